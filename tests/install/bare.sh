# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# make_bare DIR SUITE PACKAGE,...: a bare Debian of these packages and what they need, unless it
# is there.  Of the mirror that this machine's apt uses.
make_bare() {
  [ ! -e "$1/usr/bin/python3" ] || return 0
  local mirror log=$1.log
  mirror=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list 2>/dev/null |
    awk '/^URIs:/{print $2; exit} $1=="deb"{for(i=2;i<=NF;i++) if($i ~ /^(https?|file|mirror|copy|ftp)/){print $i; exit}}')
  debootstrap --variant=minbase "--include=$3" "$2" "$1" "$mirror" >"$log" 2>&1 || { tail -n 3 "$log" >&2; return 1; }
}

# over DIR PLACE: shows DIR at PLACE/root; what is written there is in memory, and gone with PLACE.
over() {
  mkdir -p "$2"
  mount -t tmpfs tmpfs "$2"
  mkdir "$2/upper" "$2/work" "$2/root"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
}
