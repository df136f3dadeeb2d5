#!/usr/bin/env bash
# system_packages.sh build PYTHON | nodes: install what is missing through apt, as root or by sudo without a password.
#
# build: a C compiler, the interpreter's venv module and headers, libsystemd's headers. nodes: what the tests on real
# systemd nodes run. A thing that is there, from a package or not, is left alone, and apt is not touched when all are.
# Where nothing may be installed, the one line to run is printed and the exit status is 3.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()

installed() { [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null) == installed ]]; }

# need PACKAGE COMMAND...: PACKAGE is missing unless dpkg knows it or COMMAND shows that what it is for works.
need() {
    local package=$1
    shift
    installed "$package" || "$@" >/dev/null 2>&1 || missing+=("$package")
}

compiles() { cc -x c -c -include stdlib.h -o /dev/null /dev/null; }
has_headers() { "$python" -c 'import pathlib, sys, sysconfig; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'; }

case ${1:-} in
build)
    python=${2:?the interpreter}
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    need gcc compiles
    need libc6-dev compiles
    need "python$version-venv" "$python" -c 'import ensurepip, venv'
    need "python$version-dev" has_headers
    need pkg-config pkg-config --version
    need libsystemd-dev pkg-config --exists libsystemd
    ;;
nodes)
    need systemd test -x /lib/systemd/systemd
    need openssh-server test -x /usr/sbin/sshd
    need openssh-client ssh -V
    need iproute2 ip -V
    need util-linux nsenter --version
    need procps ps --version
    ;;
*)
    sed -n '2p' "$0" >&2
    exit 2
    ;;
esac
[[ ${#missing[@]} -gt 0 ]] || exit 0

line="apt-get install -y --no-install-recommends ${missing[*]}"
if [[ $(id -u) -eq 0 ]]; then
    as_root=(env)
elif sudo -n true 2>/dev/null; then
    as_root=(sudo -n env)
else
    as_root=()
fi
if ! command -v apt-get >/dev/null || [[ ${#as_root[@]} -eq 0 ]]; then
    echo "missing system packages; to install them, run:  sudo $line" >&2
    exit 3
fi

# Installing openssh-server would also start an SSH server and enable it at boot. The tests start their own, inside
# their own nodes; this machine must not begin to listen because somebody ran them.
quiet_services() {
    policy=/usr/sbin/policy-rc.d
    [[ ! -e $policy ]] || return 0
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod 755 "$policy"
}

apt() { timeout 900 "${as_root[@]}" DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" </dev/null; }

exec 8<"tools/system_packages.sh" # one at a time in this checkout: `apt-get update` does not wait for its lock
flock --timeout 1800 8
echo "installing system packages: ${missing[*]}"
quiet_services
if ! { apt update && apt install -y --no-install-recommends "${missing[@]}"; } 8<&- >&2; then
    echo "apt could not install them (above); to try again, run:  sudo $line" >&2
    exit 3
fi
if [[ " ${missing[*]} " == *" openssh-server "* ]] && command -v systemctl >/dev/null; then
    "${as_root[@]}" systemctl disable ssh.service ssh.socket >/dev/null 2>&1 || true # Debian has no ssh.socket before 13
fi
