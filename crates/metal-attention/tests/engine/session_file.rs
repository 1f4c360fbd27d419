//! Session files: sequences that continue in another process, and damaged or foreign files.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use metal_attention::gguf::{GgufFile, GgufWriter, TensorDecl};
use metal_attention::sampling::SamplerOptions;
use metal_attention::{
    BUILT_IN_MODEL, CacheType, Device, EngineOptions, GenerateOptions, Generator, Model, ModelOptions, SessionError,
    SessionFile, SnapshotError,
};
use proptest::prelude::*;

fn engine() -> EngineOptions {
    EngineOptions { device: Device::Cpu, n_ctx: Some(256), n_threads: Some(1), ..Default::default() }
}

fn generator(model: &Model, engine: &EngineOptions) -> Generator {
    let sampling = SamplerOptions { seed: Some(5), temperature: 0.8, ..Default::default() };
    Generator::new(model, engine, sampling).unwrap()
}

/// Generates `n` tokens after `prompt`. Returns them and the number of cached tokens of the prompt.
fn generate(generator: &mut Generator, prompt: &[u32], n: usize) -> (Vec<u32>, usize) {
    generator.prompt(prompt, |_, _| ControlFlow::Continue(())).unwrap();
    let options = GenerateOptions { n_predict: Some(n), ignore_eos: true, ..Default::default() };
    let mut generation = generator.generate(options);
    let ids = generation.by_ref().map(|token| token.unwrap().id).collect();
    (ids, generation.timings().cached_tokens)
}

/// Writes the session of a prompt and 60 generated tokens, all but the last of which are cached. Returns the file and the
/// tokens.
fn session(folder: &Path, model: &Model) -> (PathBuf, Vec<u32>) {
    let mut generator = generator(model, &engine());
    let prompt = [1, 403, 407, 261, 378];
    let tokens = [&prompt[..], &generate(&mut generator, &prompt, 60).0].concat();
    let path = folder.join("a session");
    generator.save(&path, b"a note").unwrap();
    (path, tokens)
}

/// Opens a session file and restores it. Returns the number of cached tokens.
fn restore(path: &Path, generator: &mut Generator) -> Result<usize, SessionError> {
    generator.restore(SessionFile::open(path)?)
}

#[test]
fn a_restored_sequence_continues_as_the_saved_one_would() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::built_in().unwrap();
    let (path, tokens) = session(folder.path(), &model);
    let opened = SessionFile::open(&path).unwrap();
    assert_eq!((opened.note(), opened.ids()), (&b"a note"[..], &tokens[..64]));
    let prompt = [&tokens[..], &[400, 401]].concat();
    let want = generate(&mut generator(&model, &engine()), &prompt, 40).0;
    let mut again = generator(&model, &engine());
    assert_eq!(again.restore(opened).unwrap(), 64);
    assert_eq!(again.ids(), &tokens[..64]);
    assert_eq!(generate(&mut again, &prompt, 40), (want, 64));
    // Saving overwrites the file. Without a sequence only the note is written.
    again.save(&path, b"another").unwrap();
    assert_eq!(SessionFile::open(&path).unwrap().ids().len(), prompt.len() + 39);
    SessionFile::write(&path, &model, b"alone", None).unwrap();
    let alone = SessionFile::open(&path).unwrap();
    assert_eq!((alone.note(), alone.ids()), (&b"alone"[..], &[][..]));
    assert_eq!((again.restore(alone).unwrap(), again.forward_pass().position()), (0, 0));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no other file is left");
}

#[cfg(unix)]
#[test]
fn only_the_owner_may_read_the_file() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let folder = tempfile::tempdir().unwrap();
    let model = Model::built_in().unwrap();
    let (path, _) = session(folder.path(), &model);
    let link = folder.path().join("link");
    symlink(&path, &link).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    SessionFile::write(&link, &model, b"", None).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let no_folder = SessionFile::write(&folder.path().join("none/file"), &model, b"", None);
    assert!(matches!(no_folder, Err(SessionError::Write(_))), "{no_folder:?}");
}

/// The built-in model with one byte changed, near the end of tensor 3.
fn other_weights() -> Model {
    let file = GgufFile::from_bytes(BUILT_IN_MODEL).unwrap();
    let decls: Vec<TensorDecl> = file.tensors().iter().map(Into::into).collect();
    let mut writer = GgufWriter::new(Vec::new(), file.version(), file.metadata(), &decls).unwrap();
    for (i, tensor) in file.tensors().iter().enumerate() {
        let mut bytes = tensor.bytes().to_vec();
        let at = bytes.len() - 4;
        bytes[at] ^= u8::from(i == 3);
        writer.write(&bytes).unwrap();
    }
    let file = GgufFile::from_bytes(&writer.finish().unwrap()).unwrap();
    Model::from_gguf(file, &ModelOptions::default()).unwrap()
}

#[test]
fn files_of_other_models_and_damaged_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::built_in().unwrap();
    let (path, _) = session(folder.path(), &model);
    let (other, bytes) = (folder.path().join("other"), fs::read(&path).unwrap());
    let same = Model::from_gguf(GgufFile::from_bytes(BUILT_IN_MODEL).unwrap(), &ModelOptions::default()).unwrap();
    assert_eq!(same.fingerprint(), model.fingerprint());
    let outcome = restore(&path, &mut generator(&other_weights(), &engine()));
    assert!(matches!(outcome, Err(SessionError::OtherModel)), "{outcome:?}");
    let f32s = EngineOptions { cache_type: CacheType::F32, ..engine() };
    let outcome = restore(&path, &mut generator(&model, &f32s));
    assert!(matches!(outcome, Err(SessionError::Snapshot(SnapshotError::OtherLayout { .. }))), "{outcome:?}");
    let short = EngineOptions { n_ctx: Some(63), ..engine() };
    let outcome = restore(&path, &mut generator(&model, &short));
    assert!(matches!(outcome, Err(SessionError::TooLong { n_tokens: 64, n_ctx: 63 })), "{outcome:?}");

    let mut pass = generator(&model, &engine());
    let mut try_bytes = |bytes: &[u8]| {
        fs::write(&other, bytes).unwrap();
        let outcome = restore(&other, &mut pass);
        assert!(pass.ids().is_empty() && pass.forward_pass().position() == 0, "{outcome:?}");
        outcome.unwrap_err()
    };
    for n in [12, 19, 60, bytes.len() / 2, bytes.len() - 1] {
        let error = try_bytes(&bytes[..n]);
        assert!(matches!(error, SessionError::Cut), "{n} bytes: {error:?}");
    }
    assert!(matches!(try_bytes(b""), SessionError::Foreign));
    assert!(matches!(try_bytes(BUILT_IN_MODEL), SessionError::Foreign));
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] ^= byte;
        bytes
    };
    assert!(matches!(try_bytes(&with(8, 1)), SessionError::Version { version: 2 }));
    for at in [12, 19, 30, 60, 80, bytes.len() / 2, bytes.len() - 1] {
        let error = try_bytes(&with(at, 0x40));
        assert!(matches!(error, SessionError::Damaged { .. } | SessionError::Cut), "byte {at}: {error:?}");
    }
    assert!(matches!(try_bytes(&[&bytes[..], b"x"].concat()), SessionError::Damaged { .. }));
    let outcome = SessionFile::open(folder.path());
    assert!(matches!(outcome, Err(SessionError::Foreign | SessionError::Read(_))), "{outcome:?}");
    let outcome = SessionFile::open(&folder.path().join("none"));
    assert!(matches!(outcome, Err(SessionError::Read(_))), "{outcome:?}");
}

/// A change of a file's bytes, by offset.
#[derive(Debug, Clone)]
enum Change {
    Bytes(usize, Vec<u8>),
    Cut(usize),
    Insert(usize, Vec<u8>),
}

fn change() -> impl Strategy<Value = Change> {
    let number = prop_oneof![any::<u64>(), 0..300_u64, Just(u64::MAX), Just(1 << 40)];
    let bytes =
        prop_oneof![number.prop_map(|n| n.to_le_bytes().to_vec()), proptest::collection::vec(any::<u8>(), 1..20)];
    // Most offsets are in the head.
    let at = prop_oneof![4 => 0..600_usize, 1 => 0..200_000_usize];
    prop_oneof![
        4 => (at.clone(), bytes.clone()).prop_map(|(at, bytes)| Change::Bytes(at, bytes)),
        1 => at.clone().prop_map(Change::Cut),
        1 => (at, bytes).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
    ]
}

/// Recomputes the checksums of the head and of the blocks, as an attacker could, so that changes pass them.
fn fix_checksums(bytes: &mut [u8]) {
    let Some((begin, rest)) = bytes.split_at_mut_checked(20) else { return };
    let n_head = u64::from_le_bytes(begin[12..].try_into().unwrap()) as usize;
    let Some((head, rest)) = rest.split_at_mut_checked(n_head) else { return };
    let mut sum = crc32fast::Hasher::new();
    sum.update(begin);
    sum.update(head);
    let Some((head_sum, blocks)) = rest.split_first_chunk_mut() else { return };
    *head_sum = sum.finalize().to_le_bytes();
    if let Some((blocks, blocks_sum)) = blocks.split_last_chunk_mut() {
        *blocks_sum = crc32fast::hash(blocks).to_le_bytes();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    /// Restoring any file returns an error or a usable sequence.

    #[test]
    fn hostile_files_do_no_harm(changes in proptest::collection::vec(change(), 1..4), has_valid_checksums in any::<bool>()) {
        use std::cell::RefCell;
        type Shared = (Model, Generator, tempfile::TempDir, Vec<u8>);
        thread_local!(static ALL: RefCell<Option<Shared>> = const { RefCell::new(None) });
        ALL.with_borrow_mut(|all| {
            let (_, generator, folder, bytes) = all.get_or_insert_with(|| {
                let model = Model::built_in().unwrap();
                let folder = tempfile::tempdir().unwrap();
                let bytes = fs::read(session(folder.path(), &model).0).unwrap();
                (model.clone(), generator(&model, &engine()), folder, bytes)
            });
            let mut bytes = bytes.clone();
            for change in &changes {
                match change {
                    Change::Bytes(at, new) => {
                        for (byte, new) in bytes.iter_mut().skip(*at).zip(new) {
                            *byte = *new;
                        }
                    }
                    Change::Cut(at) => bytes.truncate(*at),
                    Change::Insert(at, new) => {
                        let at = *at.min(&bytes.len());
                        bytes.splice(at..at, new.iter().copied());
                    }
                }
            }
            if has_valid_checksums {
                fix_checksums(&mut bytes);
            }
            let path = folder.path().join("hostile");
            fs::write(&path, bytes).unwrap();
            match restore(&path, generator) {
                Ok(n) => {
                    assert_eq!((n, generator.ids().len()), (generator.forward_pass().position(), n));
                    // Keys and values are not checked: they may have any bits.
                    if generator.prompt(&[1, 403], |_, _| ControlFlow::Continue(())).is_ok() {
                        let options = GenerateOptions { n_predict: Some(1), ..Default::default() };
                        generator.generate(options).for_each(drop);
                    }
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        });
    }
}
