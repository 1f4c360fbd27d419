//! A table of the times of matrix products with every tensor type, on every instruction set that this CPU has, on one thread:
//! `cargo bench --bench tensor_types`. Names of types restrict it to these: `cargo bench --bench tensor_types -- q4_k iq4_xs`.

use std::time::Duration;

use metal_attention::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, TensorType, blocks};
use metal_attention::{CpuCeilings, CpuIsa};

/// Columns and rows of the matrix: the down projection of Llama-3.2-1B, which in most types fits a third-level cache of 32 MB.
const SHAPE: [usize; 2] = [8192, 2048];

/// Tokens of a product: a decode step of one sequence, of several, and a part of a prompt.
const TOKENS: [usize; 3] = [1, 4, 64];

/// The duration of a measurement.
const TIME: Duration = Duration::from_millis(100);

/// Prints the microseconds of a product, and for one token the ratio to the time of `Q4_0`.
fn main() {
    // `cargo test --benches` runs this program, too, and should not take minutes.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let selected = |ty: &TensorType| std::env::args().any(|arg| arg.eq_ignore_ascii_case(ty.name()));
    let all = !TensorType::ALL.iter().any(selected);
    for isa in CpuIsa::available() {
        let ceilings = CpuCeilings::new(1).expect("the caller's thread").with_isa(isa);
        println!("\n{}, one thread, a [{}, {}] matrix, microseconds\n", isa.name(), SHAPE[0], SHAPE[1]);
        println!(
            "| type | bits | {} tokens | to Q4_0 | {} | {} |\n|---|---|---|---|---|---|",
            TOKENS[0], TOKENS[1], TOKENS[2]
        );
        let [q4_0, ..] = seconds(&ceilings, TensorType::Q4_0);
        for &ty in TensorType::ALL.iter().filter(|ty| all || selected(ty)) {
            let bits = 8.0 * ty.block_bytes() as f64 / ty.block_len() as f64;
            let [one, few, many] = seconds(&ceilings, ty).map(|s| 1e6 * s);
            println!("| {ty} | {bits:.3} | {one:.0} | {:.2} | {few:.0} | {many:.0} |", one / q4_0 / 1e6);
        }
    }
}

/// The seconds of a product with each number of tokens in [`TOKENS`].
fn seconds(ceilings: &CpuCeilings, ty: TensorType) -> [f64; TOKENS.len()] {
    let decl = TensorDecl { name: "w".into(), shape: SHAPE.to_vec(), ty };
    let mut writer = GgufWriter::new(Vec::new(), 3, &Metadata::new(), &[decl]).expect("a valid tensor");
    writer.write(&blocks::random_blocks(ty, SHAPE.iter().product(), 1, 1.0)).expect("as many bytes as declared");
    let file = GgufFile::from_bytes(&writer.finish().expect("all bytes are written")).expect("a valid file");
    let seconds = ceilings.products(&[&file.tensors()[0]], &TOKENS, false, TIME).expect("the matrix fits");
    seconds.try_into().expect("a time for each number of tokens")
}
