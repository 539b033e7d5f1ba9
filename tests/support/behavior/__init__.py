"""Whether two checkouts of the program do the same, as a user can tell: by command lines, HTTP and
files.
"""
