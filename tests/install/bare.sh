# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# make_bare DIR SUITE PACKAGE,...: a bare Debian of these packages and what they need, unless it
# is there.  Of the mirror that this machine's apt uses.
make_bare() {
  [ ! -e "$1/usr/bin/python3" ] || return 0
  local mirror log=$1.log
  local conf
  conf=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list 2>/dev/null || true)
  mirror=$(awk '/^URIs:/{print $2; exit} $1=="deb"{for(i=2;i<=NF;i++) if($i ~ /^(https?|file|mirror|copy|ftp)/){print $i; exit}}' <<<"$conf")
  debootstrap --variant=minbase "--include=$3" "$2" "$1" "$mirror" >"$log" 2>&1 || { tail -n 3 "$log" >&2; return 1; }
}

# over DIR PLACE: shows DIR at PLACE/root; what is written there is in memory, and gone with PLACE.
over() {
  mkdir -p "$2"
  mount -t tmpfs tmpfs "$2"
  mkdir "$2/upper" "$2/work" "$2/root"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
}

# add_needs DIR PACKAGE.deb: what a package depends on, into a system of make_bare, by its own apt
# with this machine's settings.
add_needs() (
  set -euo pipefail
  cp -L /etc/resolv.conf "$1/etc/" 2>/dev/null || true
  cp -r /etc/apt/apt.conf.d/. "$1/etc/apt/apt.conf.d/"
  cp "$2" "$1/root/needs.deb"
  # shellcheck disable=SC2016
  unshare --mount --fork bash -euo pipefail -c '
    mount --rbind /dev "$1/dev"
    mount -t proc proc "$1/proc"
    DEBIAN_FRONTEND=noninteractive chroot "$1" sh -ec "apt-get update -qq
      apt-get install -y -qq --no-install-recommends /root/needs.deb
      dpkg -P ckptfs"
  ' x "$1" >"$1.needs.log" 2>&1 || { tail -n 3 "$1.needs.log" >&2; exit 1; }
  rm "$1/root/needs.deb"
)
