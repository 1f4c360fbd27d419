//! Flags for the devices of a server's models, and for the number of replicas.

use std::str::FromStr;

use metal_attention::{Device, EngineOptions, Model, available_memory, backends, physical_cores};

use crate::cli_error::CliError;
use crate::engine_args::{SetupArgs, at_least_one};
use crate::units;

/// The largest number of replicas on one device: each has a thread, weights and a KV cache.
const MAX_REPLICAS_PER_DEVICE: usize = 64;

/// Devices and number of replicas of a model, and the settings of each.
#[derive(clap::Args, Clone)]
#[command(next_help_heading = "Engine")]
pub struct ReplicaArgs {
    /// The device of the model: auto (a GPU in which it fits, else the CPU), cpu, cuda, cuda:1, wgpu, wgpu:1 (by index), wgpu:NAME;
    /// several, as in cuda:0,cuda:1, run a replica each
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: DeviceList,

    /// The same as --device wgpu
    #[arg(long, visible_alias = "gpu", conflicts_with = "device")]
    wgpu: bool,

    /// Replicas of the model, each with --parallel slots, its own KV cache and its own weights. They are distributed over the
    /// devices of --device in order; --device cuda means all NVIDIA GPUs. Replicas on the CPU divide the threads [default: one for
    /// each device of --device]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    replicas: Option<usize>,

    #[command(flatten)]
    setup: SetupArgs,
}

/// The value of `--device`: one or several devices.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeviceList {
    /// The devices, in order.
    devices: Vec<Device>,
    /// Whether the text is "cuda" without a number, which stands for all NVIDIA GPUs if there are several replicas.
    any_cuda: bool,
}

impl FromStr for DeviceList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The name of a GPU may contain a comma, so a list that begins with a name is split only if another one follows.
        let one = |name: &str| name.parse::<Device>().map_err(|error| error.to_string());
        let named = ["gpu:", "wgpu:"];
        let devices = if named.iter().any(|name| text.starts_with(name))
            && !named.iter().any(|name| text.contains(&format!(",{name}")))
        {
            vec![one(text)?]
        } else {
            text.split(',').map(|name| one(name.trim())).collect::<Result<_, _>>()?
        };
        if devices.len() > 1 && devices.contains(&Device::Auto) {
            return Err("auto is one device: name each in a list".into());
        }
        Ok(Self { devices, any_cuda: text == "cuda" })
    }
}

impl ReplicaArgs {
    /// These flags, with the context `n_ctx` and the device in `device` if they are given.
    pub fn with(&self, n_ctx: Option<usize>, device: Option<&str>) -> Result<Self, String> {
        let device = device.map(str::parse).transpose()?;
        Ok(Self {
            wgpu: self.wgpu && device.is_none(),
            device: device.unwrap_or_else(|| self.device.clone()),
            setup: self.setup.clone().with_n_ctx(n_ctx),
            ..*self
        })
    }

    /// The options of each replica for `model`. An error if the flags contradict each other, or devices or memory are too small.
    pub fn options(&self, model: &Model) -> Result<Vec<EngineOptions>, CliError> {
        let setup = self.setup.options(model);
        let list = match (self.wgpu, self.device.any_cuda, self.replicas) {
            (true, _, _) => vec![Device::Wgpu],
            (false, true, Some(n)) if n > 1 => cuda_devices(setup.n_ranks)?,
            (false, _, _) => self.device.devices.clone(),
        };
        let n = self.replicas.unwrap_or(list.len());
        if n < list.len() {
            let message = format!(
                "--replicas {n}: --device names {} devices, each of which runs at least one replica: name fewer, or leave \
                 --replicas out",
                list.len()
            );
            return Err(CliError::Usage(message));
        }
        let first = |device: &Device| if let Device::Cuda(card) = device { Some(*card) } else { None };
        let overlap = |(i, card): (usize, usize)| {
            list.iter()
                .filter_map(first)
                .skip(i + 1)
                .any(|other| setup.n_ranks > 1 && other.abs_diff(card) < setup.n_ranks)
        };
        if list.iter().filter_map(first).enumerate().any(overlap) {
            let n = setup.n_ranks;
            let message = format!(
                "--device names cards less than {n} apart, of which each begins {n} that share a replica (--tensor-parallel {n}): \
                 name the first of each, as in --device cuda:0,cuda:{n}"
            );
            return Err(CliError::Usage(message));
        }
        if n > list.len() {
            check_room(n, &list, model)?;
        }
        let devices: Vec<_> = list.into_iter().cycle().take(n).collect();
        // `auto` counts as a CPU here, because it may choose one.
        let is_cpu = |device: &&Device| matches!(device, Device::Cpu | Device::Auto);
        let n_cpu = devices.iter().filter(is_cpu).count();
        let sharing: Vec<_> = devices.iter().map(|one| devices.iter().filter(|other| *other == one).count()).collect();
        let options = devices.into_iter().zip(sharing).map(|(device, n_sharing)| {
            let shares = n_cpu > 1 && is_cpu(&&device);
            let n_threads = setup.n_threads.or(shares.then(physical_cores));
            let n_threads = if shares { n_threads.map(|n| (n / n_cpu).max(1)) } else { n_threads };
            EngineOptions { device, n_threads, long_context: Some(n_sharing), ..setup.clone() }
        });
        Ok(options.collect())
    }
}

/// Refuses more replicas than a device runs, or than have memory for their weights on the CPU.
fn check_room(n: usize, devices: &[Device], model: &Model) -> Result<(), CliError> {
    let refused = |why: String| Err(CliError::Usage(format!("--replicas {n}: {why}")));
    let max = devices.len().saturating_mul(MAX_REPLICAS_PER_DEVICE);
    if n > max {
        return refused(format!(
            "a device runs {MAX_REPLICAS_PER_DEVICE} replicas at most, and {} {max}: name more devices, or give --parallel more \
             requests at once",
            units::count(devices.len(), "device")
        ));
    }
    let n_cpu = devices.iter().cycle().take(n).filter(|device| matches!(device, Device::Cpu)).count();
    let needed = model.gguf().tensor_bytes().saturating_mul(n_cpu as u64);
    match available_memory() {
        Some(available) if needed > available => refused(format!(
            "the weights of {n_cpu} replicas on the CPU take {}, and {} of memory are available: use fewer",
            units::bytes(needed),
            units::bytes(available)
        )),
        _ => Ok(()),
    }
}

/// All NVIDIA GPUs; if `n_ranks` GPUs share a replica, the first one of each group. If there are fewer GPUs than `n_ranks`, or
/// if CUDA is not compiled in, it is the first GPU, and building the forward pass reports why that does not work.
fn cuda_devices(n_ranks: usize) -> Result<Vec<Device>, CliError> {
    let list = backends::CUDA.gpus();
    if let Some(why) = list.why_none.filter(|_| backends::CUDA.is_compiled()) {
        return Err(CliError::General(why));
    }
    Ok((0..(list.gpus.len() / n_ranks).max(1)).map(|i| Device::Cuda(i * n_ranks)).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        args: ReplicaArgs,
    }

    fn options(flags: &[&str]) -> Result<Vec<(String, Option<usize>)>, String> {
        let parsed = Flags::try_parse_from(["serve"].iter().chain(flags)).map_err(|error| error.to_string())?;
        let options = parsed.args.options(&Model::built_in().unwrap()).map_err(|error| error.to_string())?;
        Ok(options.into_iter().map(|options| (options.device.to_string(), options.n_threads)).collect())
    }

    #[test]
    fn replicas_are_distributed_over_devices() {
        let of = |names: &[&str]| Ok(names.iter().map(|&name| (name.to_owned(), None)).collect::<Vec<_>>());
        assert_eq!(options(&[]), of(&["auto"]));
        assert_eq!(options(&["--device", "cuda:0,cuda:1"]), of(&["cuda", "cuda:1"]));
        let four = ["--device", "cuda:0,cuda:1", "--replicas", "4"];
        assert_eq!(options(&four), of(&["cuda", "cuda:1", "cuda", "cuda:1"]));
        assert_eq!(options(&["--device", "gpu:A, B"]), of(&["gpu:A, B"]));
        assert_eq!(options(&["--device", "gpu:0,gpu:1"]), of(&["gpu:0", "gpu:1"]));
        assert_eq!(options(&["--device", "wgpu:0,gpu:1"]), of(&["gpu:0", "gpu:1"]));
        assert_eq!(options(&["--wgpu"]), of(&["gpu"]));
        assert_eq!(options(&["--gpu", "--replicas", "2"]), of(&["gpu", "gpu"]));
    }

    #[test]
    fn threads_are_divided_among_replicas() {
        let cpu = |n| ("cpu".to_owned(), Some(n));
        assert_eq!(options(&["--device", "cpu", "--replicas", "3", "-t", "8"]), Ok(vec![cpu(2); 3]));
        assert_eq!(options(&["--device", "cpu,cpu", "-t", "1"]), Ok(vec![cpu(1); 2]));
        let mixed = [("cuda".to_owned(), Some(8)), cpu(8)];
        assert_eq!(options(&["--device", "cuda:0,cpu", "-t", "8"]), Ok(mixed.to_vec()));
    }

    #[test]
    fn contradicting_flags_are_refused() {
        for flags in [
            &["--device", "cuda:0,1"][..],
            &["--device", "cuda:0,"],
            &["--device", "cuda:0,cuda:1", "--tensor-parallel", "2"],
            &["--device", "auto,cpu"],
            &["--device", "cuda:0,cuda:1", "--replicas", "1"],
            &["--replicas", "0"],
            &["--replicas", "65"],
            &["--replicas", "9223372036854775808"],
            &["--device", "cuda:0,cuda:1", "--replicas", "100000000"],
            &["--gpu", "--device", "cpu"],
        ] {
            assert!(options(flags).is_err(), "{flags:?}");
        }
    }
}
