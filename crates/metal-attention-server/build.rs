//! Puts the built files of the page, `page/` (the sources are in `web/`), into the library, compressed where that makes them smaller.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use flate2::write::GzEncoder;
use flate2::{Compression, Crc};

fn main() {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("page");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo::rerun-if-changed={}", root.display());
    let mut paths = Vec::new();
    collect(&root, &mut paths);
    paths.sort();
    let mut table = String::from("&[\n");
    for (i, path) in paths.iter().enumerate() {
        let bytes = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut crc = Crc::new();
        crc.update(&bytes);
        let etag = format!("\"{:08x}-{:x}\"", crc.sum(), bytes.len());
        let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
        let compressed = encoder.write_all(&bytes).and_then(|()| encoder.finish()).expect("a vector takes all bytes");
        let is_gzip = 10 * compressed.len() < 9 * bytes.len();
        let file = out.join(format!("page-{i}"));
        fs::write(&file, if is_gzip { &compressed } else { &bytes })
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let file = file.to_str().expect("paths of builds are Unicode");
        let name = path.strip_prefix(&root).expect("it is in the folder").to_str().expect("names are ASCII");
        let name = name.replace('\\', "/");
        writeln!(
            table,
            "File {{ path: {name:?}, etag: {etag:?}, is_gzip: {is_gzip}, bytes: include_bytes!({file:?}) }},"
        )
        .expect("a string takes all text");
    }
    table.push(']');
    fs::write(out.join("page_files.rs"), table).expect("OUT_DIR can be written");
}

/// Adds the files below `folder`.
fn collect(folder: &Path, paths: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("the folder can be read").path();
        if path.is_dir() { collect(&path, paths) } else { paths.push(path) }
    }
}
