# Sourced. install_packages NAME...: Debian packages, as root or by sudo without a password.
# Fails with the command to type when neither is possible.
install_packages() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      echo "peakmark: missing packages; run: sudo apt-get install $*" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  if ! command -v apt-get >/dev/null; then
    echo "peakmark: this is not Debian or Ubuntu; install what provides: $*" >&2
    return 1
  fi
  "${as_root[@]}" apt-get update -q >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "$@" >&2
}
