//! The manual pages and completions beside the program: those that `install.sh` put there are replaced with it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Where completions are below the folder `share`; an archive has them by their names, in its folder `completions`.
const COMPLETIONS: [&str; 3] = [
    "bash-completion/completions/metal-attention",
    "zsh/site-functions/_metal-attention",
    "fish/vendor_completions.d/metal-attention.fish",
];

/// Replaces the manual pages and completions of `program` by those in `unpacked`, an archive's folders `man` and `completions`. What is
/// not installed stays so. An error names the file.
pub fn replace(program: &Path, unpacked: &Path) -> Result<(), (PathBuf, io::Error)> {
    let Some(share) = share(program) else { return Ok(()) };
    let pages = share.join("man/man1");
    if pages.join("metal-attention.1").exists() {
        let man = unpacked.join("man");
        let names = fs::read_dir(&man).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        for page in names.map_err(|error| (man, error))? {
            copy(&page.path(), &pages.join(page.file_name()))?;
        }
    }
    for completion in COMPLETIONS.map(|path| share.join(path)) {
        let name = completion.file_name().expect("a path that ends with a name");
        if completion.exists() {
            copy(&unpacked.join("completions").join(name), &completion)?;
        }
    }
    Ok(())
}

/// The folder of manual pages and completions: beside one for programs that is called `bin`.
fn share(program: &Path) -> Option<PathBuf> {
    let folder = program.parent().filter(|folder| folder.ends_with("bin"))?;
    Some(folder.with_file_name("share"))
}

fn copy(from: &Path, to: &Path) -> Result<(), (PathBuf, io::Error)> {
    fs::copy(from, to).map(drop).map_err(|error| (to.to_owned(), error))
}
