//! Measures how fast a vocabulary loads and encodes.
//!
//! ```text
//! cargo run --release -p metal-attention-tokenizer --example encode_speed -- VOCABULARY.gguf [TEXT]
//! ```
//!
//! Encodes the file TEXT, and one megabyte each of some repeated characters, which must not take
//! much longer. One thread; the best of five runs.

use metal_attention_gguf::GgufFile;
use metal_attention_tokenizer::{EncodeOptions, Tokenizer, TokenizerOptions};
use std::error::Error;
use std::time::{Duration, Instant};

const MEGABYTE: usize = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let vocabulary = args.next().ok_or("usage: encode_speed VOCABULARY.gguf [TEXT]")?;
    let file = GgufFile::read(&vocabulary)?;
    let load = || Tokenizer::from_metadata(file.metadata(), &TokenizerOptions::default());
    let (tokenizer, time) = best_of_five(load);
    let tokenizer = tokenizer?;
    println!(
        "{}: {} {}, {} tokens, built in {:.1} ms",
        vocabulary.to_string_lossy(),
        tokenizer.model(),
        tokenizer.pre(),
        tokenizer.n_vocab(),
        time.as_secs_f64() * 1e3
    );
    if let Some(path) = args.next() {
        let text = std::fs::read_to_string(&path)?;
        measure(&tokenizer, &path.to_string_lossy(), &text);
    }
    for unit in ["a", " ", "7", "\n", "!", "中", "😀", "ab ", "<"] {
        let text = unit.repeat(MEGABYTE / unit.len());
        measure(&tokenizer, &format!("{unit:?} repeated"), &text);
    }
    Ok(())
}

fn measure(tokenizer: &Tokenizer, what: &str, text: &str) {
    let (ids, time) = best_of_five(|| tokenizer.encode(text, EncodeOptions::default()));
    let megabytes = text.len() as f64 / MEGABYTE as f64;
    println!("  {:6.1} MB/s  {megabytes:5.2} MB, {:8} tokens  {what}", megabytes / time.as_secs_f64(), ids.len());
}

fn best_of_five<T>(mut run: impl FnMut() -> T) -> (T, Duration) {
    let mut once = || {
        let start = Instant::now();
        let result = run();
        (result, start.elapsed())
    };
    let mut best = once();
    for _ in 0..4 {
        let next = once();
        if next.1 < best.1 {
            best = next;
        }
    }
    best
}
