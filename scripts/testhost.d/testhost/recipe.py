"""What goes into the image: packages, this machine's sources and authorities, the guest files, and how it is packed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from .tools import TesthostError, run

SUITE = "bookworm"
ROOT_PARTUUID = "7e57a057-0000-4000-8000-000000000001"
ROOT_DISK_BYTES = 6 * 2**30
GUEST_FILES = Path(__file__).resolve().parent.parent / "guest"
# what a small Debian server has; everything that a role needs beyond this is the role's to install
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "udev", "kmod", "python3", "python3-apt", "openssh-server",
    "e2fsprogs", "util-linux", "fdisk", "iproute2", "iputils-ping", "sudo", "ca-certificates", "procps", "less",
)  # fmt: skip
KERNEL_PACKAGE = "linux-image-cloud-amd64"
# background work that only disturbs a host of minutes
MASKED_UNITS = (
    "e2scrub_reap.service", "e2scrub_all.timer", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
    # comes with nvme-cli and fails on every host without NVMe over fabrics, which would then count as degraded
    "nvmf-autoconnect.service",
)  # fmt: skip
ENABLED_UNITS: Mapping[str, Mapping[str, str]] = {
    "nspawn": {},
    "qemu": {
        "multi-user.target.wants": "/lib/systemd/system/systemd-networkd.service",
        "sysinit.target.wants": "/etc/systemd/system/testhost-hostkey.service",
    },
}
# marks the processes of a build, so that what a killed one left is found
BUILD_MARKER = "KVFLEET_TESTHOST_BUILD=1"


def debian_sources(files: Mapping[str, str], suite: str = SUITE) -> str:
    """Return this machine's own package sources of one Debian suite, in deb822 form, or an empty text.

    Only sources that the Debian keyring vouches for count; a third party's repository stays out of the image.

    :param files: file name to text, of ``sources.list`` and the files of ``sources.list.d``.
    """
    stanzas = []
    for name, text in sorted(files.items()):
        if name.endswith(".sources"):
            stanzas += [_debian_stanza(part, suite) for part in re.split(r"\n[ \t]*\n", text)]
        elif name.endswith(".list"):
            stanzas += [_debian_line(line, suite) for line in text.splitlines()]
    return "\n".join(stanza for stanza in stanzas if stanza)


def _is_suite(name: str, suite: str) -> bool:
    return name == suite or name.startswith(f"{suite}-")


def _debian_stanza(text: str, suite: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    suites = [name for name in fields.get("suites", "").split() if _is_suite(name, suite)]
    keyring = fields.get("signed-by", "")
    if not suites or "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() == "no":
        return ""
    if keyring and "debian-archive" not in keyring:
        return ""
    return _stanza(fields.get("uris", ""), suites, fields.get("components", "main"))


def _debian_line(line: str, suite: str) -> str:
    match = re.fullmatch(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]+?)\s*(?:#.*)?", line.strip())
    if not match or not _is_suite(match[3], suite):
        return ""
    if "signed-by" in (match[1] or "") and "debian-archive" not in match[1]:
        return ""
    return _stanza(match[2], [match[3]], match[4])


def _stanza(uris: str, suites: Iterable[str], components: str) -> str:
    return (
        f"Types: deb\nURIs: {uris}\nSuites: {' '.join(suites)}\nComponents: {components}\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )


def apt_settings(dump: str) -> str:
    """Return this machine's way to its package sources: proxies, certificates, checks of dates.

    :param dump: the output of ``apt-config dump``. A proxy on the machine's own loopback is reached from a host at
        10.0.2.2, where both kinds of user network put the machine.
    """
    wanted = re.compile(r'(?i)Acquire::(?:https?|ftp|Check-Valid-Until|Check-Date|Retries)\b.* "(.+)";')
    lines = [line for line in dump.splitlines() if wanted.fullmatch(line)]
    return "".join(re.sub(r"//(?:127\.0\.0\.1|localhost)(?=[:/\"])", "//10.0.2.2", line) + "\n" for line in lines)


def machine_sources() -> str:
    """Return the package sources to build from: this machine's own. Refuses when it has none of Debian."""
    apt = Path("/etc/apt")
    paths = [apt / "sources.list", *apt.glob("sources.list.d/*")]
    files = {str(path): path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()}
    sources = debian_sources(files)
    if not sources:
        raise TesthostError(
            f"this machine's apt has no Debian sources of {SUITE}: add them to /etc/apt/sources.list.d."
        )
    return sources


def certificate_authorities() -> dict[str, bytes]:
    """Return the certificate authorities that this machine's administrator added, by file name."""
    folder = Path("/usr/local/share/ca-certificates")
    return {f"machine-{path.stem}.crt": path.read_bytes() for path in sorted(folder.glob("**/*.crt"))}


def guest_files(backend: str) -> dict[str, tuple[int, bytes]]:
    """Return the files that the image gets on top of the packages: path to mode and content."""
    return {
        str(path.relative_to(tree)): (path.stat().st_mode & 0o777, path.read_bytes())
        for tree in (GUEST_FILES / "both", GUEST_FILES / backend)
        for path in sorted(tree.glob("**/*"))
        if path.is_file()
    }


def inputs(backend: str) -> list[bytes]:
    """Return everything that this machine and this checkout put into the image, the recipe itself included."""
    dump = run(["apt-config", "dump"], check=False).stdout if shutil.which("apt-config") else ""
    parts = [Path(__file__).read_bytes(), machine_sources().encode(), apt_settings(dump).encode()]
    for name, content in certificate_authorities().items():
        parts += [name.encode(), content]
    for name, (mode, content) in guest_files(backend).items():
        parts += [name.encode(), str(mode).encode(), content]
    return parts


def bootstrap(work: Path, backend: str, client_public_key: bytes) -> None:
    """Install the packages and add the guest files in ``work/root``."""
    tree = work / "root"
    sources = work / "machine.sources"
    sources.write_text(machine_sources(), encoding="utf-8")
    packages = [*PACKAGES, *([KERNEL_PACKAGE] if backend == "qemu" else [])]
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("man", "locale", "doc")]
    # the kernel starts without an initrd, so none is built
    run([
        "env", "INITRD=No", BUILD_MARKER,
        "mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "--format=directory",
        f"--include={','.join(packages)}", "--dpkgopt=force-unsafe-io", *excluded,
        "--aptopt=Apt::Install-Recommends \"false\"", SUITE, tree, sources,
    ])  # fmt: skip
    _add_guest_files(tree, backend, client_public_key)


def _add_guest_files(tree: Path, backend: str, client_public_key: bytes) -> None:
    for name, (mode, content) in guest_files(backend).items():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_bytes(content)
        target.chmod(mode)
    units = tree / "etc" / "systemd" / "system"
    for unit in MASKED_UNITS:
        _link(units / unit, "/dev/null")
    for wants, unit_file in ENABLED_UNITS[backend].items():
        _link(units / wants / Path(unit_file).name, unit_file)
    for key in (tree / "etc" / "ssh").glob("ssh_host_*"):
        # each host gets its own
        key.unlink()
    (tree / "etc" / "hostname").write_text("testhost\n", encoding="utf-8")
    (tree / "etc" / "machine-id").write_text("", encoding="utf-8")
    ssh_folder = tree / "root" / ".ssh"
    ssh_folder.mkdir(mode=0o700, exist_ok=True)
    (ssh_folder / "authorized_keys").write_bytes(client_public_key)
    settings = apt_settings(run(["apt-config", "dump"], check=False).stdout)
    (tree / "etc" / "apt" / "apt.conf.d" / "90testhost").write_text(settings, encoding="utf-8")
    # the lists are empty but fresh: "cache_valid_time" would skip the update and find no package
    lists = tree / "var" / "lib" / "apt" / "lists"
    run(["touch", "--date=2000-01-01", lists])
    authorities = certificate_authorities()
    for name, content in authorities.items():
        (tree / "usr" / "local" / "share" / "ca-certificates" / name).write_bytes(content)
    if authorities:
        # a clean environment: a TMPDIR from outside does not exist inside
        run(["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "chroot", tree, "update-ca-certificates"])


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def pack(tree: Path, folder: Path, backend: str) -> None:
    """Turn the tree into what hosts start from: ``root.sqfs``, or ``vmlinuz`` and ``root.img``."""
    if backend == "nspawn":
        run([
            "mksquashfs", tree, folder / "root.sqfs", "-comp", "zstd", "-Xcompression-level", "3",
            "-noappend", "-quiet", "-no-progress",
        ])  # fmt: skip
        return
    kernels = sorted((tree / "boot").glob("vmlinuz-*"))
    if not kernels:
        raise TesthostError(f"{KERNEL_PACKAGE} brought no kernel into the image.")
    shutil.copyfile(kernels[-1], folder / "vmlinuz")
    disk = folder / "root.img"
    with disk.open("wb") as handle:
        handle.truncate(ROOT_DISK_BYTES)
    run(
        ["sfdisk", "--quiet", disk],
        stdin=f"label: gpt\nstart=2048, type=L, uuid={ROOT_PARTUUID}, name=root\n",
    )
    # filled without mounting anything; the first MiB and the table's copy at the end are not the partition's
    kib = (ROOT_DISK_BYTES - 2 * 2**20) // 1024
    run(["mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-E", "offset=1048576", "-d", tree, disk, f"{kib}k"])
