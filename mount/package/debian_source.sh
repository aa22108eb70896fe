# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# fetch_sources DIRECTORY SUITE PACKAGE...: unpacks source packages of a release of the
# distribution into DIRECTORY, as PACKAGE-VERSION/, through the mirror that this machine's apt
# already uses; nothing on the system changes.  Each is the distribution's, with its patches.
fetch_sources() {
  local work conf mirror key suite=$2
  work=$(realpath -m "$1"); shift 2
  conf=$(cat /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list 2>/dev/null || true)
  mirror=$(awk '/^URIs:/{print $2; exit} $1=="deb"{for(i=2;i<=NF;i++) if($i ~ /^(https?|file|mirror|cdrom|copy|ftp)/){print $i; exit}}' <<<"$conf")
  key=$(awk '/^Signed-By:/{print $2; exit}' <<<"$conf"); key=${key:-/usr/share/keyrings/debian-archive-keyring.gpg}
  [ -n "$mirror" ] || { echo "apt has no mirror" >&2; return 1; }
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial"; chmod 755 "$work"
  echo "deb-src [signed-by=$key] $mirror $suite main" >"$work/sources.list"
  local apt=(apt-get -qq -o APT::Sandbox::User=root -o "Dir::Etc::SourceList=$work/sources.list"
    -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache")
  "${apt[@]}" update
  (cd "$work" && "${apt[@]}" source "$@")
}
