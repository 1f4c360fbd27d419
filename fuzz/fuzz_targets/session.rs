//! Fuzz target of session files. Any bytes, with checksums corrected, give either a typed error or a session that generation
//! can be resumed from.
#![no_main]

use std::cell::RefCell;
use std::ops::ControlFlow;

use libfuzzer_sys::fuzz_target;
use metal_attention::sampling::SamplerOptions;
use metal_attention::{Device, EngineOptions, GenerateOptions, Generator, Model, SessionError, SessionFile};

/// Bytes before the head: magic, version, and the length of the head.
const PREAMBLE: usize = 20;

/// Corrects the checksums of the head and of the blocks, which random input never has right.
fn correct_checksums(bytes: &mut [u8]) {
    let Some((begin, rest)) = bytes.split_at_mut_checked(PREAMBLE) else { return };
    let n_head = u64::from_le_bytes(begin[12..].try_into().expect("eight bytes")) as usize;
    let Some((head, rest)) = rest.split_at_mut_checked(n_head) else { return };
    let mut sum = crc32fast::Hasher::new();
    sum.update(begin);
    sum.update(head);
    let Some((of_head, blocks)) = rest.split_first_chunk_mut() else { return };
    *of_head = sum.finalize().to_le_bytes();
    if let Some((blocks, of_blocks)) = blocks.split_last_chunk_mut() {
        *of_blocks = crc32fast::hash(blocks).to_le_bytes();
    }
}

/// A generator of the built-in model, and the file that inputs are written to.
fn set_up() -> (Generator, tempfile::NamedTempFile) {
    let model = Model::built_in().expect("a model");
    let engine = EngineOptions { device: Device::Cpu, n_ctx: Some(128), n_threads: Some(1), ..Default::default() };
    let generator = Generator::new(&model, &engine, SamplerOptions::greedy()).expect("a small model");
    (generator, tempfile::NamedTempFile::new().expect("a folder for temporary files"))
}

thread_local!(static STATE: RefCell<(Generator, tempfile::NamedTempFile)> = RefCell::new(set_up()));

/// Restores the session in `bytes`; returns its number of tokens.
fn restore(generator: &mut Generator, file: &tempfile::NamedTempFile, bytes: &[u8]) -> Result<usize, SessionError> {
    std::fs::write(file.path(), bytes).expect("disk space for a file");
    generator.restore(SessionFile::open(file.path())?)
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = bytes.to_vec();
    correct_checksums(&mut bytes);
    STATE.with_borrow_mut(|(generator, file)| match restore(generator, file, &bytes) {
        Ok(n) => {
            assert_eq!((generator.ids().len(), generator.forward_pass().position()), (n, n));
            let prompt: Vec<u32> = generator.ids().iter().copied().chain([1]).take(100).collect();
            // The prompt fails where restored keys and values are not finite; that is allowed.
            if generator.prompt(&prompt, |_, _| ControlFlow::Continue(())).is_ok() {
                let options = GenerateOptions { n_predict: Some(1), ..Default::default() };
                generator.generate(options).for_each(drop);
            }
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    });
});
