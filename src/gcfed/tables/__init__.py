"""Tables of experiments: methods × settings × seeds in a YAML, an equal search for each cell, and
our numbers beside those of a paper. ``gcfed-table`` is their command.
"""
