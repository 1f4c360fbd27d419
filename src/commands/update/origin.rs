//! What installed this program, by the path of its file.

use std::fmt;
use std::path::Path;

/// Where the images of `deploy/Dockerfile` have the program.
const IN_IMAGE: &str = "/usr/local/bin/metal-attention";

/// Files that Docker and Podman create in containers.
const CONTAINER_MARKS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];

/// What installed the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// An archive or an installer: the program may replace itself.
    Archive,
    /// `cargo install`.
    Cargo,
    /// A build in a checkout.
    Checkout,
    /// The packages of the system: Debian, Fedora, Arch and others.
    SystemPackages,
    /// Homebrew.
    Homebrew,
    /// Nix.
    Nix,
    /// Scoop.
    Scoop,
    /// winget.
    Winget,
    /// The image of a container.
    Container,
    /// `install.ps1`: Windows has archives of another kind.
    WindowsInstaller,
}

impl Origin {
    /// What installed `program`, an absolute path without links.
    pub fn of(program: &Path) -> Self {
        let is_below = |folder: &str| program.components().any(|part| part.as_os_str().eq_ignore_ascii_case(folder));
        let is_installed_by_cargo = is_below(".cargo")
            || std::env::var_os("CARGO_HOME").is_some_and(|home| program.starts_with(Path::new(&home).join("bin")))
            // The list of what `cargo install --root` installed.
            || program.ancestors().nth(2).is_some_and(|root| root.join(".crates.toml").exists());
        // Cargo's marks of a folder of builds: the first is missing where the folder existed before.
        let is_built = program.ancestors().skip(1).take(3).any(|folder| folder.join("CACHEDIR.TAG").exists())
            || program.with_file_name(".cargo-lock").exists();
        if is_installed_by_cargo {
            Self::Cargo
        } else if is_built {
            Self::Checkout
        } else if is_below("Cellar") || is_below("homebrew") || is_below(".linuxbrew") {
            Self::Homebrew
        } else if program.starts_with("/nix/store") {
            Self::Nix
        } else if is_below("scoop") {
            Self::Scoop
        } else if is_below("WinGet") {
            Self::Winget
        } else if cfg!(windows) {
            Self::WindowsInstaller
        } else if program == Path::new(IN_IMAGE) && CONTAINER_MARKS.iter().any(|mark| Path::new(mark).exists()) {
            Self::Container
        } else if program.starts_with("/usr") && !program.starts_with("/usr/local") || program.starts_with("/bin") {
            Self::SystemPackages
        } else {
            Self::Archive
        }
    }

    /// What updates a program that this installed; `None`: the program itself.
    pub fn advice(self) -> Option<&'static str> {
        Some(match self {
            Self::Archive => return None,
            Self::Cargo => "cargo install --force with the same arguments as before updates it",
            Self::Checkout => "update the sources and build it again",
            Self::SystemPackages => "install the newest package, as docs/install.md says",
            Self::Homebrew => "brew upgrade metal-attention updates it",
            Self::Nix => "nix profile upgrade metal-attention updates it",
            Self::Scoop => "scoop update metal-attention updates it",
            Self::Winget => "winget upgrade metal-attention updates it",
            Self::Container => "pull or build a newer image",
            Self::WindowsInstaller => "run install.ps1 of the newest release again",
        })
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Archive => "an installer",
            Self::Cargo => "cargo",
            Self::Checkout => "a build in a checkout",
            Self::SystemPackages => "the packages of this system",
            Self::Homebrew => "Homebrew",
            Self::Nix => "Nix",
            Self::Scoop => "Scoop",
            Self::Winget => "winget",
            Self::Container => "the image of this container",
            Self::WindowsInstaller => "the installer for Windows",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_package_managers_are_known_by_their_folders() {
        let known = [
            ("/home/a/.cargo/bin/metal-attention", Origin::Cargo),
            ("/usr/bin/metal-attention", Origin::SystemPackages),
            ("/opt/homebrew/Cellar/metal-attention/0.1.0/bin/metal-attention", Origin::Homebrew),
            ("/home/linuxbrew/.linuxbrew/Cellar/metal-attention/0.1.0/bin/metal-attention", Origin::Homebrew),
            ("/nix/store/abc-metal-attention-0.1.0/bin/metal-attention", Origin::Nix),
        ];
        for (path, origin) in known {
            assert_eq!(Origin::of(Path::new(path)), origin, "{path}");
            assert!(origin.advice().is_some(), "{path}");
        }
        let build = tempfile::tempdir().unwrap();
        std::fs::write(build.path().join("CACHEDIR.TAG"), "").unwrap();
        assert_eq!(Origin::of(&build.path().join("release/metal-attention")), Origin::Checkout);
        assert_eq!(Origin::of(&build.path().join("target/release/metal-attention")), Origin::Checkout);
        let older = tempfile::tempdir().unwrap();
        std::fs::write(older.path().join(".cargo-lock"), "").unwrap();
        assert_eq!(Origin::of(&older.path().join("metal-attention")), Origin::Checkout);
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join(".crates.toml"), "").unwrap();
        assert_eq!(Origin::of(&root.path().join("bin/metal-attention")), Origin::Cargo);
    }
}
