#!/bin/sh
# Makes sure that this machine can build Quire: Python 3.10 or later with venv and headers, a C compiler, a JDK 17 or
# later with headers (for Spark and for the jar), and Maven (it fetches Spark's own tests).
# What is missing is installed where that is possible (root, apt-get); else it says what to install.
# Use: check_machine.sh [python]
set -eu
python=${1:-python3}

has_python() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}
has_venv() {
    "$python" -c 'import venv, ensurepip' 2>/dev/null
}
has_headers() {
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' 2>/dev/null
}
has_compiler() {
    command -v "${CC:-cc}" >/dev/null 2>&1
}
has_jdk() {
    java="${JAVA_HOME:+$JAVA_HOME/bin/}java"
    settings=$("$java" -XshowSettings:properties -version 2>&1) || return 1
    version=$(printf '%s\n' "$settings" | sed -n 's/^ *java\.specification\.version = //p')
    home=$(printf '%s\n' "$settings" | sed -n 's/^ *java\.home = //p')
    [ "${version%%.*}" -ge 17 ] && [ -e "$home/include/jni.h" ]
}
has_maven() {
    command -v mvn >/dev/null 2>&1
}
missing() {
    has_python || echo python3
    has_venv || echo python3-venv
    has_headers || echo python3-dev
    has_compiler || echo gcc libc6-dev
    # A JDK that was named and does not fit is for its owner to correct: no package would help.
    [ -n "${JAVA_HOME:-}" ] || has_jdk || echo openjdk-17-jdk-headless
    has_maven || echo maven
}

packages=$(missing | tr '\n' ' ')
if [ -n "$packages" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing with apt-get: $packages"
    apt-get update -q >/dev/null
    # shellcheck disable=SC2086  # a list of names
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $packages >/dev/null
fi

failed=0
need() { # test, message
    if ! "$1"; then
        echo "Missing: $2" >&2
        failed=1
    fi
}
need has_python "Python 3.10 or later (Debian, Ubuntu: apt-get install python3); or name one: make PYTHON=/path/to/python3.12"
need has_venv "Python's venv module (Debian, Ubuntu: apt-get install python3-venv)"
need has_headers "Python's headers (Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)"
need has_compiler "a C compiler (Debian, Ubuntu: apt-get install gcc libc6-dev; Fedora: dnf install gcc), or name one: CC=clang"
need has_jdk "a JDK 17 or later with headers (Debian, Ubuntu: apt-get install openjdk-17-jdk-headless; Fedora: dnf install java-17-openjdk-devel), or name one: JAVA_HOME=/path/to/jdk"
need has_maven "Maven (Debian, Ubuntu: apt-get install maven; Fedora: dnf install maven)"
if [ "$failed" = 1 ]; then
    exit 1
fi
echo "Found $("$python" --version), $("${CC:-cc}" --version | head -n 1), Java $version and Maven"
