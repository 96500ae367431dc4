"""One attention call by itself: its variants, what each computes, moves and holds, and how long."""
