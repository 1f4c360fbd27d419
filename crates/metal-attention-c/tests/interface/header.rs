//! The checked-in header `include/metal_attention.h` is the one that cbindgen generates from the sources.

use std::path::Path;

#[test]
fn the_header_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let header = root.join("include/metal_attention.h");
    let mut builder = cbindgen::Builder::new().with_config(cbindgen::Config::from_root_or_default(root));
    let files = [
        "status", "model", "context", "chat", "answer", "grammar", "sampling", "picture", "generate", "batch", "embed",
    ];
    for file in files {
        builder = builder.with_src(root.join(format!("src/{file}.rs")));
    }
    let mut generated = Vec::new();
    builder.generate().unwrap().write(&mut generated);
    let generated = String::from_utf8(generated).unwrap();
    if std::env::var_os("UPDATE_HEADER").is_some() {
        std::fs::write(&header, &generated).unwrap();
    }
    let found = std::fs::read_to_string(&header).unwrap_or_default().replace("\r\n", "\n");
    assert!(
        found == generated,
        "{} is not current: UPDATE_HEADER=1 cargo test -p metal-attention-c writes it",
        header.display()
    );
    for name in exported() {
        assert!(generated.contains(&name), "{name} is not in the header");
    }
}

/// The exported functions (as `name(`) and constants (as `#define MA_NAME `) of the sources, spelt as in the header.
fn exported() -> Vec<String> {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(sources).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for function in text.split("#[unsafe(no_mangle)]").skip(1) {
            let (head, _) = function.split_once('(').unwrap();
            names.push(format!("{}(", head.rsplit(' ').next().unwrap()));
        }
        for constant in text.split("pub const MA_").skip(1) {
            names.push(format!("#define MA_{} ", constant.split_once(':').unwrap().0));
        }
    }
    assert!(names.len() > 20, "{names:?}");
    names
}
