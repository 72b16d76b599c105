"""The logic of kvfleet: standard library only, Python 3.9 or newer, no hidden I/O.

Ansible ships this package to hosts as ``ansible.module_utils.kvfleet``; on the controller the same files
are ``kvfleet.core``. Modules inside import each other relatively.
"""
