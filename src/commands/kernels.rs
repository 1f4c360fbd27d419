//! `kernels`: prints the wgpu backend's kernels in WGSL or translated.

use std::io::{self, Write};
use std::path::PathBuf;

use metal_attention::wgpu::{ShaderFeatures, ShaderLanguage, catalogue, emit};

use crate::cli_error::CliError;
use crate::output_file::OutputFile;

const AFTER_HELP: &str = "\
A kernel is shown with the constants of a small model, as it runs in release builds on a device with all features that \
the language has: 16-bit floats, subgroups, matrix units (none in HLSL). SPIR-V is binary: on the terminal it is \
listed in words, with --output it goes to a file for spirv-dis and spirv-val.

Examples:
  metal-attention kernels
  metal-attention kernels rmsnorm
  metal-attention kernels --emit msl rmsnorm
  metal-attention kernels --emit spirv --output argmax.spv argmax";

/// List the GPU kernels, or print one in the language of a backend
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// The kernel to print; without it, the names of all
    name: Option<String>,

    /// The language
    #[arg(long, value_enum, default_value = "wgsl", requires = "name", value_name = "LANGUAGE")]
    emit: EmitLanguage,

    /// Write to this file
    #[arg(long, short = 'o', requires = "name", value_name = "FILE")]
    output: Option<PathBuf>,

    /// Lanes of a subgroup; 0: a size that kernels cannot rely on
    #[arg(long, default_value_t = 32, value_parser = parse_subgroup_size, requires = "name", value_name = "N")]
    subgroup_size: u32,

    /// For a device without subgroups
    #[arg(long, requires = "name")]
    no_subgroups: bool,

    /// For a device without 16-bit floats
    #[arg(long, requires = "name")]
    no_f16: bool,

    /// For a device without matrix units
    #[arg(long, requires = "name")]
    no_matrix_units: bool,
}

/// The values of `--emit`.
#[derive(Clone, Copy, clap::ValueEnum)]
enum EmitLanguage {
    /// The language that the kernels are written in
    Wgsl,
    /// Vulkan
    Spirv,
    /// Metal
    Msl,
    /// DirectX 12
    Hlsl,
}

impl EmitLanguage {
    /// The language of the wgpu crate.
    fn shader_language(self) -> ShaderLanguage {
        match self {
            Self::Wgsl => ShaderLanguage::Wgsl,
            Self::Spirv => ShaderLanguage::SpirV,
            Self::Msl => ShaderLanguage::Msl,
            Self::Hlsl => ShaderLanguage::Hlsl,
        }
    }
}

/// Parses a number of lanes.
fn parse_subgroup_size(text: &str) -> Result<u32, String> {
    let sizes = [0, 4, 8, 16, 32, 64, 128];
    text.parse().ok().filter(|size| sizes.contains(size)).ok_or_else(|| format!("it is one of {sizes:?}"))
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let catalogue = catalogue();
    let Some(name) = &args.name else {
        let mut names: Vec<_> = catalogue.into_iter().map(|key| key.name + "\n").collect();
        names.sort();
        return print(names.concat().as_bytes());
    };
    let key = catalogue.iter().find(|key| key.name == *name).ok_or_else(|| {
        CliError::Usage(format!("there is no kernel {name:?}; `metal-attention kernels` lists their names"))
    })?;
    let subgroups = !args.no_subgroups;
    let features = ShaderFeatures {
        subgroups,
        subgroup_size: if subgroups { args.subgroup_size } else { 0 },
        neighbours: if subgroups { args.subgroup_size } else { 0 },
        f16: !args.no_f16,
        integer_dot: true,
        cooperative_f16: subgroups && !args.no_f16 && !args.no_matrix_units,
        cooperative_f32: subgroups && !args.no_matrix_units,
    };
    let code = emit(key, features, args.emit.shader_language()).map_err(|e| CliError::General(e.to_string()))?;
    match &args.output {
        Some(path) => {
            let mut file = OutputFile::create(path)?;
            file.write_all(&code).map_err(|source| CliError::Write { to: path.display().to_string(), source })?;
            file.commit()
        }
        None if matches!(args.emit, EmitLanguage::Spirv) => print(words(&code).as_bytes()),
        None => print(&code),
    }
}

/// Writes to stdout.
fn print(text: &[u8]) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    out.write_all(text).and_then(|()| out.flush()).map_err(CliError::stdout)
}

/// A listing of 32-bit words, eight a line, each line after the index of its first word.
fn words(code: &[u8]) -> String {
    let (words, _) = code.as_chunks::<4>();
    let line = |(i, line): (usize, &[[u8; 4]])| {
        let words: Vec<_> = line.iter().map(|&word| format!("{:08x}", u32::from_le_bytes(word))).collect();
        format!("{:06}: {}\n", 8 * i, words.join(" "))
    };
    words.chunks(8).enumerate().map(line).collect()
}
