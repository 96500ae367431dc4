"""Ask the dashboard whether it is well; the exit code is the answer (for Docker)."""

import sys
import urllib.request

URL = "http://127.0.0.1:8501/_stcore/health"


def main() -> int:
    """Return 0 when the dashboard answers 200 within three seconds, else 1."""
    try:
        with urllib.request.urlopen(URL, timeout=3) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{URL} does not answer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
