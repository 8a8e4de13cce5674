"""``penstock bench``: penstock against other libraries and against the machine's memory bandwidth, in one run.

``cases`` lists the benchmarks, ``runner`` starts a fresh interpreter (``child``) per workload and number of threads,
and ``interleave`` runs the sides of a case in turns. Only the command imports this package.
"""
