"""``penstock bench``: ours against other libraries and against the memory of the machine, in one run.

``cases`` names what can be measured, ``runner`` starts a fresh interpreter (``child``) per workload and number of
threads, ``meet`` lets the sides of a case run in turns. Nothing of penstock imports this package but the command.
"""
