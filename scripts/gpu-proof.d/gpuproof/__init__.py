"""Proof on a GPU host without a network: pack on the controller, run kvfleet's own playbooks there, collect, report.

The host's part is standard library only.
"""
