"""Benchmarks behind the tables of docs/results: ours beside other engines, and the server's costs.

Run from the repository: ``python -m benchmarks NAME …``. Measurements for users' own models and
servers are in the package: ``foredraft measure``.
"""
