"""Corrections of the clients' drift."""
