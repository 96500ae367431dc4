"""What people say in numbers about FlashAttention and ZeRO, computed and judged."""
