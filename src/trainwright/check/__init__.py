"""Reads what people already have, and says what is wrong with it before a GPU is rented.

text -> `document` (a tree whose every key knows its line) -> `formats` (one file a format: recognizes it, says what it means) -> `setup` (one neutral
view of all files and the launch line together) -> `checks` (one file a check) -> `findings`. Nothing that is read is ever run.
"""
