"""A round is a transaction: its state goes to the disk whole or not at all, and comes back to its
own run only.
"""
