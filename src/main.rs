//! The program `metal-attention`; its library says how it is built.

fn main() -> std::process::ExitCode {
    metal_attention_cli::main()
}
