#!/bin/sh
# Installs metal-attention @VERSION@ from @ADDRESS@:
#   curl -fsSL @LATEST@/install.sh | sh
#   curl -fsSL @LATEST@/install.sh | sh -s -- --to ~/bin
# A POSIX shell, curl or wget, tar, gzip and a program for SHA-256 suffice. `--help` lists the options.
set -eu

downloads="@DOWNLOADS@"
version="@VERSION@"
# The program with GPU support needs this glibc or a later one.
glibc="@GLIBC@"
shells="bash zsh fish"

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "install.sh: $1"
    [ $# -lt 2 ] || say "install.sh: $2"
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

usage() {
    cat <<USAGE
Installs metal-attention.

Options:
  --version VERSION  this version instead of $version
  --to DIR           the folder of the program [default: /usr/local/bin for root, else ~/.local/bin]
  --cpu              on Linux: the static program, which runs on the CPU alone
  --uninstall        remove the program, its manual pages and completions; models stay
  --help             this text
USAGE
}

# Writes what is at address $1 to file $2.
download() {
    if have curl; then
        curl -fsSL --retry 3 -o "$2" "$1"
    elif have wget; then
        wget -q -O "$2" "$1"
    else
        fail "neither curl nor wget is here to download $1" "Install one of them and try again."
    fi || fail "could not download $1" "Check that this version exists and that the network reaches its host."
}

# Prints the SHA-256 of file $1.
sha256() {
    if have sha256sum; then
        sha256sum "$1" | cut -d ' ' -f 1
    elif have shasum; then
        shasum -a 256 "$1" | cut -d ' ' -f 1
    elif have openssl; then
        openssl dgst -sha256 -r "$1" | cut -d ' ' -f 1
    else
        fail "sha256sum, shasum and openssl are missing: the download cannot be verified" "Install one of them and try again."
    fi
}

# Whether this Linux has such a glibc.
have_glibc() {
    have getconf || return 1
    libc="$(getconf GNU_LIBC_VERSION 2>/dev/null)" || return 1
    libc="${libc#glibc }"
    minor="${libc#*.}"
    [ "${libc%%.*}" = "${glibc%%.*}" ] && [ "${minor%%.*}" -ge "${glibc#*.}" ]
}

# Prints the targets to try, the best first.
targets() {
    machine="$(uname -m)"
    case "$(uname -s)" in
        Linux)
            case "$machine" in
                x86_64 | amd64) machine=x86_64 ;;
                aarch64 | arm64) machine=aarch64 ;;
                *) fail "there is no program for Linux on $machine" "Build it: cargo install --locked --git @ADDRESS@ metal-attention-cli" ;;
            esac
            if [ "$cpu" = no ] && have_glibc; then
                echo "$machine-unknown-linux-gnu"
            fi
            echo "$machine-unknown-linux-musl"
            ;;
        Darwin)
            # A shell that is translated for an Intel CPU names that one.
            if [ "$machine" = arm64 ] || [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" = 1 ]; then
                echo aarch64-apple-darwin
            else
                fail "there is no program for Macs with an Intel CPU" "Build it: cargo install --locked --git @ADDRESS@ metal-attention-cli"
            fi
            ;;
        *) fail "there is no program for $(uname -s)" "On Windows use install.ps1; elsewhere build it: cargo install --locked --git @ADDRESS@ metal-attention-cli" ;;
    esac
}

# The folder for manual pages and completions: beside one for programs that is called bin.
share() {
    case "$to" in
        */bin) echo "${to%/bin}/share" ;;
    esac
}
completion() {
    case "$1" in
        bash) echo bash-completion/completions/metal-attention ;;
        zsh) echo zsh/site-functions/_metal-attention ;;
        fish) echo fish/vendor_completions.d/metal-attention.fish ;;
    esac
}

uninstall() {
    [ -e "$to/metal-attention" ] || fail "there is no $to/metal-attention" "Name its folder: --to DIR. A package is removed by its package manager."
    rm -f "$to/metal-attention" || fail "could not remove $to/metal-attention" "Try again as a user who may, as with sudo."
    share="$(share)"
    if [ -n "$share" ]; then
        rm -f "$share/man/man1/metal-attention.1" "$share/man/man1/metal-attention-"*.1
        for shell in $shells; do
            rm -f "$share/$(completion "$shell")"
        done
    fi
    say "Removed $to/metal-attention. Downloaded models stay in the cache of the Hugging Face hub (~/.cache/huggingface)."
}

# Downloads, verifies and unpacks the archive of target $1 into $work/unpacked; false if the program does not run here.
fetch() {
    archive="metal-attention-$version-$1.tar.gz"
    download "$downloads/v$version/$archive" "$work/$archive"
    expected="$(sed -n "s/^\([0-9a-f]\{64\}\) [ *]$archive\$/\1/p" "$work/SHA256SUMS")"
    [ -n "$expected" ] || fail "SHA256SUMS of version $version does not name $archive" "The release is incomplete: please report it."
    actual="$(sha256 "$work/$archive")" || exit 1
    [ "$actual" = "$expected" ] ||
        fail "$archive has the SHA-256 $actual, not $expected" "The download is damaged or was changed: nothing was installed. Try again."
    rm -rf "$work/unpacked"
    mkdir "$work/unpacked"
    gzip -dc "$work/$archive" | tar -xf - -C "$work/unpacked"
    unpacked="$work/unpacked/metal-attention-$version-$1"
    "$unpacked/metal-attention" --version >/dev/null 2>"$work/error"
}

put() { # file, folder, name
    mkdir -p "$2" && cp "$1" "$2/.$3.new" && mv -f "$2/.$3.new" "$2/$3"
}

install() {
    work="$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    wanted="$(targets)"
    download "$downloads/v$version/SHA256SUMS" "$work/SHA256SUMS"
    runs=no
    for target in $wanted; do
        say "Downloading metal-attention $version for $target"
        if fetch "$target"; then
            runs=yes
            break
        fi
        say "The program for $target does not run here: $(head -n 1 "$work/error")"
    done
    [ "$runs" = yes ] || fail "no program for this system runs here" "Build it: cargo install --locked --git @ADDRESS@ metal-attention-cli"

    chmod 755 "$unpacked/metal-attention"
    put "$unpacked/metal-attention" "$to" metal-attention ||
        fail "could not write $to/metal-attention" "Choose another folder with --to DIR, or try again as a user who may write there."
    share="$(share)"
    if [ -n "$share" ]; then
        for page in "$unpacked"/man/*.1; do
            put "$page" "$share/man/man1" "$(basename "$page")"
        done
        for shell in $shells; do
            file="$share/$(completion "$shell")"
            put "$unpacked/completions/$(basename "$file")" "$(dirname "$file")" "$(basename "$file")"
        done
    fi
    say "Installed $to/metal-attention ($target)."
    case ":$PATH:" in
        *":$to:"*) ;;
        *)
            say "$to is not in PATH. Add it, in ~/.profile or your shell's file:"
            say "    export PATH=\"$to:\$PATH\""
            ;;
    esac
    say "Try it: metal-attention run -p \"Once upon a time\""
}

main() {
    action=install cpu=no to=""
    while [ $# -gt 0 ]; do
        case "$1" in
            --version | --to)
                [ $# -ge 2 ] || fail "$1 needs a value" "install.sh --help lists the options."
                if [ "$1" = --to ]; then to="$2"; else version="${2#v}"; fi
                shift
                ;;
            --cpu) cpu=yes ;;
            --uninstall) action=uninstall ;;
            --help | -h)
                usage
                exit 0
                ;;
            *) fail "there is no option $1" "install.sh --help lists the options." ;;
        esac
        shift
    done
    if [ -z "$to" ]; then
        if [ "$(id -u)" = 0 ]; then to=/usr/local/bin; else to="$HOME/.local/bin"; fi
    fi
    case "$to" in
        /*) ;;
        *) to="$(pwd)/$to" ;;
    esac
    to="${to%/}"
    "$action"
}

# The last line: a download that was cut off does nothing.
main "$@"
