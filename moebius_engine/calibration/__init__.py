"""Which layout decodes faster at how many requests, measured on the user's own machine.

measure times decode steps of an engine, curve turns them into a crossing, store keeps it for the next start.
"""
