"""Throw-away Debian hosts from Debian packages only: a booted container or a virtual machine, with NVMe-style disks.

``cli`` is the command, ``state`` what is remembered about a host, ``recipe`` what goes into the image, ``image`` the
cache of images, ``disks`` backing files and loop devices, ``container`` and ``machine`` the two kinds of host,
``lifecycle`` starting, stopping and cleaning up, ``access`` SSH keys and configuration, ``tools`` everything that
leaves Python. ``../guest/`` holds the files that the image gets on top of Debian's packages: for both kinds of host,
for containers, for virtual machines.
"""
