"""What produces the tables of docs/results: ours beside other engines, and the server's own costs.

Run from the repository: ``python -m benchmarks NAME …``. What users measure on their own model and
server is in the package: ``foredraft bench …``.
"""
