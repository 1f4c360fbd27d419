//! The compiled kernels in `prebuilt/` belong to the sources in `kernels/`.

use std::path::Path;

use sha2::{Digest, Sha256};

#[test]
fn compiled_kernels_belong_to_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources: Vec<_> =
        std::fs::read_dir(root.join("kernels")).unwrap().map(|entry| entry.unwrap().path()).collect();
    // The order in which a shell lists kernels/*.cu kernels/*.cuh.
    sources.sort_by_key(|path| (path.extension() == Some("cuh".as_ref()), path.clone()));
    let mut hash = Sha256::new();
    for source in &sources {
        hash.update(std::fs::read(source).unwrap());
    }
    let hash = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().concat();
    let recorded = std::fs::read_to_string(root.join("prebuilt/sources.sha256")).unwrap();
    assert_eq!(recorded.trim(), hash, "prebuilt/ is not what kernels/ would compile to: run scripts/cuda-kernels");
}
