//! `doctor`: examines whether this machine is set up for models, and says what to do where it is not.

use std::io::{self, IsTerminal, Write};
use std::net::TcpListener;
use std::path::Path;

use metal_attention::backends::{self, GpuDetails, GpuList};
use metal_attention::{available_memory, cpu_simd_name, physical_cores};
use metal_attention_hub::{Environment, Hub};
use serde::Serialize;

use crate::cli_error::CliError;
use crate::first_model::{automatic_gpu, largest_model};
use crate::metadata_text::safe;
use crate::terminal::no_colour;
use crate::units;

const AFTER_HELP: &str = "\
Each line begins with ok, note (something could be better) or problem (something does not work), and says what to do. The exit \
code is 1 if there is a problem. Nothing is changed, and nothing is sent to anyone.

With --json stdout gets a list of objects with the keys subject, verdict, found, advice (or null).

Examples:
  metal-attention doctor
  metal-attention doctor --port 11434";

/// Examine the drivers, memory, caches and models of this machine
#[derive(clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// The port that `serve` shall listen on
    #[arg(long, default_value_t = 8080)]
    port: u16,

    /// Write a JSON list
    #[arg(long)]
    json: bool,
}

/// What was found of one subject.
#[derive(Debug, Serialize, PartialEq, Eq)]
struct Finding {
    /// What was examined.
    subject: &'static str,
    verdict: Verdict,
    /// What is there.
    found: String,
    /// What to do; `None`: nothing.
    advice: Option<String>,
}

/// Whether a subject is in order.
#[derive(Debug, Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// It is.
    Ok,
    /// It works, but could be better.
    Note,
    /// It does not work.
    Problem,
}

impl Finding {
    fn ok(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Ok, found: found.into(), advice: None }
    }

    fn note(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Note, found: found.into(), advice: Some(advice.into()) }
    }

    fn problem(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Problem, found: found.into(), advice: Some(advice.into()) }
    }
}

/// Runs the command.
pub fn run(args: &Args) -> Result<(), CliError> {
    let (wgpu, cuda) = (backends::WGPU.gpus(), backends::CUDA.gpus());
    let mut findings = vec![cpu(cpu_simd_name(), physical_cores()), of_wgpu(&wgpu), of_cuda(&cuda)];
    findings.push(automatic(&[&cuda, &wgpu]));
    findings.push(memory(available_memory()));
    findings.extend(models());
    findings.push(port(args.port));
    let mut out = io::stdout().lock();
    let written = if args.json {
        let list = serde_json::to_string_pretty(&findings);
        writeln!(out, "{}", list.map_err(|e| CliError::General(format!("cannot write JSON: {e}")))?)
    } else {
        let is_terminal = out.is_terminal();
        findings.iter().try_for_each(|finding| write(finding, is_terminal, &mut out))
    };
    written.and_then(|()| out.flush()).map_err(CliError::stdout)?;
    let n = findings.iter().filter(|finding| finding.verdict == Verdict::Problem).count();
    if n > 0 { Err(CliError::General(format!("{} found", units::count(n, "problem")))) } else { Ok(()) }
}

/// Writes a finding, its advice below it.
fn write(finding: &Finding, is_terminal: bool, out: &mut impl Write) -> io::Result<()> {
    let (word, colour) = match finding.verdict {
        Verdict::Ok => ("ok", 32),
        Verdict::Note => ("note", 33),
        Verdict::Problem => ("problem", 31),
    };
    let has_colour = is_terminal && !no_colour();
    let (begin, end) = if has_colour { (format!("\x1b[{colour}m"), "\x1b[0m") } else { (String::new(), "") };
    writeln!(out, "{begin}{word:<8}{end} {:<12} {}", finding.subject, finding.found)?;
    match &finding.advice {
        Some(advice) => writeln!(out, "{:<21} -> {advice}", ""),
        None => Ok(()),
    }
}

/// The instruction set of the CPU.
fn cpu(simd: &str, n_cores: usize) -> Finding {
    let found = format!("{simd}, {}", units::count(n_cores, "physical core"));
    if simd == "scalar" {
        let advice = "there are no kernels for this CPU's vector instructions, so that it is slow; x86-64 needs AVX2 and FMA, which a virtual machine may hide";
        return Finding::note("CPU", found, advice);
    }
    Finding::ok("CPU", found)
}

/// The GPUs through Vulkan, Metal or DirectX.
fn of_wgpu(list: &GpuList) -> Finding {
    let is_hardware = |details: &GpuDetails| match details {
        GpuDetails::Wgpu { kind, .. } => *kind != "software",
        GpuDetails::Cuda { .. } => true,
    };
    let names: Vec<_> = list.gpus.iter().map(|gpu| format!("{} ({})", safe(&gpu.name), gpu.device)).collect();
    let drivers = if cfg!(not(feature = "wgpu")) {
        "no driver changes that: for a GPU, install or build the program that has them"
    } else if cfg!(target_os = "linux") {
        "for a GPU of AMD, Intel or NVIDIA install its Vulkan driver (Debian: mesa-vulkan-drivers, Fedora: mesa-vulkan-drivers, Arch: vulkan-radeon or vulkan-intel; NVIDIA: its own driver) and the Vulkan loader (libvulkan1, vulkan-loader)"
    } else {
        "install the newest driver of the GPU's manufacturer"
    };
    if list.gpus.is_empty() {
        let why = list.why_none.clone().unwrap_or_else(|| "there is none".into());
        return Finding::note("GPU", why, drivers);
    }
    if !list.gpus.iter().any(|gpu| is_hardware(&gpu.details)) {
        let advice = format!("this one is software and slower than the CPU's own kernels; {drivers}");
        return Finding::note("GPU", names.join(", "), advice);
    }
    Finding::ok("GPU", names.join(", "))
}

/// The GPUs through CUDA.
fn of_cuda(list: &GpuList) -> Finding {
    if list.gpus.is_empty() {
        let why = list.why_none.clone().unwrap_or_else(|| "there is no NVIDIA GPU".into());
        return Finding::ok("CUDA", why);
    }
    let name = |gpu: &backends::Gpu| format!("{} ({}, CUDA {})", safe(&gpu.name), gpu.device, gpu.driver);
    let found = list.gpus.iter().map(name).collect::<Vec<_>>().join(", ");
    if list.gpus.iter().any(|gpu| gpu.is_usable) {
        return Finding::ok("CUDA", found);
    }
    Finding::note("CUDA", found, "these GPUs are too old for the kernels; --device gpu uses them through Vulkan")
}

/// The device that `--device auto` takes.
fn automatic(lists: &[&GpuList]) -> Finding {
    match automatic_gpu(lists) {
        Some(gpu) => {
            let memory = gpu.memory.map_or(String::new(), |memory| {
                format!(", which has {}: models of up to {}", units::bytes(memory), units::bytes(largest_model(memory)))
            });
            Finding::ok("--device", format!("auto is {}{memory}", gpu.device))
        }
        None => Finding::ok("--device", "auto is cpu"),
    }
}

/// Memory below which few models run.
const LITTLE: u64 = 2 << 30;

/// The free main memory.
fn memory(free: Option<u64>) -> Finding {
    let Some(free) = free else { return Finding::ok("memory", "the system does not report how much is free") };
    let found =
        format!("{} free: models of up to {} on the CPU", units::bytes(free), units::bytes(largest_model(free)));
    if free < LITTLE {
        return Finding::note("memory", found, "close other programs, or take a small model, such as smollm2");
    }
    Finding::ok("memory", found)
}

/// The models in the cache, the room there, and downloads that were not finished.
fn models() -> Vec<Finding> {
    let listed = Environment::read().and_then(|environment| {
        let hub = Hub::new(environment);
        Ok((hub.cache().to_owned(), hub.models()?, hub.unfinished()?))
    });
    let (cache, models, unfinished) = match listed {
        Ok(listed) => listed,
        Err(error) => return vec![Finding::problem("models", error.to_string(), "HF_HOME names another folder")],
    };
    let bytes = models.iter().map(metal_attention_hub::CachedModel::total_bytes).fold(0, u64::saturating_add);
    let shown = safe(&cache.display().to_string());
    let mut findings = vec![if models.is_empty() {
        let advice = "metal-attention pull llama3.2 gets one; without -m the small built-in model runs";
        Finding::note("models", format!("none in {shown}"), advice)
    } else {
        Finding::ok("models", format!("{} of {} in {shown}", units::count(models.len(), "model"), units::bytes(bytes)))
    }];
    findings.push(room(&cache, free_space(&cache)));
    if !unfinished.is_empty() {
        let bytes = unfinished.iter().map(|unfinished| unfinished.bytes).fold(0, u64::saturating_add);
        let found = format!("{} of {}", units::count(unfinished.len(), "unfinished download"), units::bytes(bytes));
        let advice = "metal-attention list names them; pull goes on with one, rm removes it";
        findings.push(Finding::note("downloads", found, advice));
    }
    findings
}

/// The free space of the disk with the cache.
fn room(cache: &Path, free: Option<u64>) -> Finding {
    let Some(free) = free else { return Finding::ok("disk", "the system does not report how much is free") };
    let found = format!("{} free for {}", units::bytes(free), safe(&cache.display().to_string()));
    if free < 8 << 30 {
        return Finding::note("disk", found, "a model of 8 billion weights takes 5 GB: HF_HOME names another folder");
    }
    Finding::ok("disk", found)
}

/// The free bytes of the file system that a folder is on, or will be; `None`: not known.
#[cfg(unix)]
fn free_space(folder: &Path) -> Option<u64> {
    let there = folder.ancestors().find(|folder| folder.is_dir())?;
    let found = nix::sys::statvfs::statvfs(there).ok()?;
    #[allow(clippy::useless_conversion)] // the types differ by system
    Some(u64::from(found.blocks_available()).saturating_mul(u64::from(found.fragment_size())))
}

/// The same, where the system is not asked.
#[cfg(not(unix))]
fn free_space(_: &Path) -> Option<u64> {
    None
}

/// Whether a server can listen on the port.
fn port(port: u16) -> Finding {
    match TcpListener::bind(("127.0.0.1", port)) {
        Ok(_) => Finding::ok("port", format!("{port} is free for serve")),
        Err(error) => {
            let advice = "a server may run there already (its page is at that port); serve --port N takes another one";
            Finding::note("port", format!("{port} cannot be used: {error}"), advice)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(finding: &Finding) -> String {
        let mut out = Vec::new();
        write(finding, false, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn findings_say_what_to_do() {
        assert_eq!(text(&cpu("avx2", 4)), "ok       CPU          avx2, 4 physical cores\n");
        assert!(
            text(&cpu("scalar", 1))
                .contains("note     CPU          scalar, 1 physical core\n                      -> ")
        );
        assert_eq!(memory(Some(1 << 30)).verdict, Verdict::Note);
        assert_eq!(memory(Some(8 << 30)).verdict, Verdict::Ok);
        assert_eq!(room(Path::new("/x"), Some(1)).verdict, Verdict::Note);
        let none = GpuList { gpus: Vec::new(), why_none: Some("no driver".into()), auto: Err("none".into()) };
        assert_eq!((of_wgpu(&none).verdict, of_cuda(&none).verdict), (Verdict::Note, Verdict::Ok));
        assert_eq!(automatic(&[&none]).found, "auto is cpu");
    }

    #[test]
    fn a_port_in_use_is_noticed() {
        let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        assert_eq!(port(taken.local_addr().unwrap().port()).verdict, Verdict::Note);
    }
}
