"""Data sets are read as rows, from files, folders, registries and the Hugging Face hub. No torch is
imported.

A row is a mapping from the names of columns to plain values. A source yields its rows one after
another, each with a number by which an error can name it.
"""
