"""``python -m trainwright``."""

from .cli import main

main()
