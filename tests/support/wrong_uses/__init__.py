"""The table of wrong uses: what a user may get wrong, and the message that it gets.

`test_wrong_uses.py` tests every row, and `docs/messages.md` is made of them.
"""
