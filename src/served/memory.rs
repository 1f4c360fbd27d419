//! The memory that a model takes on each device, so that the server can choose a device and decide which models to unload.

use std::sync::OnceLock;

use metal_attention::backends::{self, GpuDetails};
use metal_attention::{Device, EngineOptions, Model, available_memory};
use metal_attention_server::http::{MemoryNeed, Placement};

/// The placements in which `model` can run, one replica for each of `engines`, with a picture encoder of `encoder` bytes beside the
/// first, and a draft model on a device of its own for each. The device `auto` may be any NVIDIA GPU with
/// enough memory; if there is none, the only placement has it on the CPU. Capacities count as if no model were loaded.
pub fn placements(
    engines: &[EngineOptions],
    model: &Model,
    encoder: u64,
    draft: Option<(&Model, &Device)>,
) -> Vec<Placement> {
    let mut placements = placements_of_text(engines, model);
    // The first need is of the first replica's device.
    for need in placements.iter_mut().filter_map(|placement| placement.first_mut()) {
        need.bytes = need.bytes.saturating_add(encoder);
    }
    if let Some((model, device)) = draft {
        let options = |engine: &EngineOptions| EngineOptions { device: device.clone(), n_ranks: 1, ..engine.clone() };
        let drafts: Vec<_> = engines.iter().flat_map(|engine| of_replica(&options(engine), model)).collect();
        for placement in &mut placements {
            for need in &drafts {
                add(placement, need.clone());
            }
        }
    }
    placements
}

/// Adds a need to those of the same device.
fn add(placement: &mut Placement, need: MemoryNeed) {
    match placement.iter_mut().find(|known| known.device == need.device) {
        Some(known) => known.bytes = known.bytes.saturating_add(need.bytes),
        None => placement.push(need),
    }
}

/// The placements without a picture encoder.
fn placements_of_text(engines: &[EngineOptions], model: &Model) -> Vec<Placement> {
    let auto = engines.iter().find(|engine| engine.device == Device::Auto);
    let gpus = auto.map_or_else(Vec::new, |engine| gpus_with_room(engine, model, gpus_for(model)));
    if gpus.is_empty() {
        return vec![needs(engines, model)];
    }
    let on_gpu = |gpu| engines.iter().map(|engine| with_auto(engine, Device::Cuda(gpu))).collect::<Vec<_>>();
    gpus.into_iter().map(|gpu| needs(&on_gpu(gpu), model)).collect()
}

/// The options for the device that `placement` reserves memory of: if the device is `auto`, the GPU in `placement`, if it has
/// one.
pub fn placed(engine: &EngineOptions, placement: &Placement) -> EngineOptions {
    let device = placement.iter().find_map(|need| need.device.parse().ok());
    match device {
        Some(gpu @ Device::Cuda(_)) => with_auto(engine, gpu),
        _ => engine.clone(),
    }
}

/// The options with `auto` replaced by `device`.
fn with_auto(engine: &EngineOptions, device: Device) -> EngineOptions {
    let device = if engine.device == Device::Auto { device } else { engine.device.clone() };
    EngineOptions { device, ..engine.clone() }
}

/// The memory that the replicas take together, one entry for each device.
fn needs(engines: &[EngineOptions], model: &Model) -> Placement {
    let mut needs = Placement::new();
    engines.iter().flat_map(|engine| of_replica(engine, model)).for_each(|need| add(&mut needs, need));
    needs
}

/// The memory that one replica takes, by device.
fn of_replica(engine: &EngineOptions, model: &Model) -> Vec<MemoryNeed> {
    match &engine.device {
        Device::Cpu | Device::Auto => vec![on_cpu(engine, model)],
        Device::Cuda(first) => on_gpus(engine, model, *first),
        // The capacity of a GPU is not known through wgpu.
        _ => {
            let bytes = engine.memory_bytes(model, None);
            vec![MemoryNeed { device: engine.device.to_string(), bytes, capacity: None }]
        }
    }
}

/// The memory that a replica takes on the CPU.
fn on_cpu(engine: &EngineOptions, model: &Model) -> MemoryNeed {
    // The free memory at the first call, before any model is loaded.
    static CAPACITY: OnceLock<Option<u64>> = OnceLock::new();
    let free = available_memory();
    let capacity = *CAPACITY.get_or_init(|| free);
    MemoryNeed { device: "cpu".to_owned(), bytes: engine.memory_bytes(model, free), capacity }
}

/// The memory of an NVIDIA GPU.
struct GpuMemory {
    /// The number of the GPU in CUDA's order.
    ordinal: usize,
    /// Total memory in bytes.
    memory: u64,
}

/// The memory that a replica takes of each of the GPUs that share it by tensor parallelism, of which `first` is the first.
/// Each has an equal part of weights and KV cache.
fn on_gpus(engine: &EngineOptions, model: &Model, first: usize) -> Vec<MemoryNeed> {
    // The driver and the kernels take the rest.
    const PERCENT: u64 = 95;
    let n_gpus = engine.n_ranks.max(1);
    let ordinals = first..first.saturating_add(n_gpus);
    let capacity = |ordinal| all_gpus().iter().find(|gpu| gpu.ordinal == ordinal).map(|gpu| gpu.memory / 100 * PERCENT);
    let free = ordinals.clone().map(capacity).sum();
    let bytes = engine.memory_bytes(model, free).div_ceil(n_gpus as u64);
    let need = |ordinal| MemoryNeed { device: format!("cuda:{ordinal}"), bytes, capacity: capacity(ordinal) };
    ordinals.map(need).collect()
}

/// The ordinals of the GPUs in which `model` fits with a tenth of the memory left free, the rule of `--device auto`.
fn gpus_with_room(engine: &EngineOptions, model: &Model, gpus: &[GpuMemory]) -> Vec<usize> {
    let has_room = |gpu: &&GpuMemory| {
        let most = gpu.memory - gpu.memory / 10;
        engine.memory_bytes(model, Some(most)) <= most
    };
    gpus.iter().filter(has_room).map(|gpu| gpu.ordinal).collect()
}

/// The NVIDIA GPUs that can run `model`.
fn gpus_for(model: &Model) -> &'static [GpuMemory] {
    if backends::CUDA.supports(model.spec()).is_ok() { all_gpus() } else { &[] }
}

/// The NVIDIA GPUs that are new enough for the kernels.
fn all_gpus() -> &'static [GpuMemory] {
    static GPUS: OnceLock<Vec<GpuMemory>> = OnceLock::new();
    GPUS.get_or_init(|| {
        let usable = backends::CUDA.gpus().gpus.into_iter().filter(|gpu| gpu.is_usable);
        let memory = usable.filter_map(|gpu| match gpu.details {
            GpuDetails::Cuda { ordinal, .. } => Some(GpuMemory { ordinal, memory: gpu.memory? }),
            GpuDetails::Wgpu { .. } => None,
        });
        memory.collect()
    })
}

#[cfg(test)]
mod tests {
    use metal_attention::speculation::DrafterMemory;

    use super::*;

    fn engine(device: Device) -> EngineOptions {
        EngineOptions { device, n_ctx: Some(256), ..Default::default() }
    }

    #[test]
    fn replicas_on_a_device_take_its_memory_together() {
        let model = Model::built_in().unwrap();
        let one = needs(&[engine(Device::Cpu)], &model);
        let bytes = engine(Device::Cpu).memory_bytes(&model, None);
        assert_eq!((one.len(), one[0].device.as_str(), one[0].bytes), (1, "cpu", bytes));
        let three = needs(&[engine(Device::Cpu), engine(Device::Wgpu), engine(Device::Cpu)], &model);
        let devices: Vec<_> = three.iter().map(|need| (need.device.as_str(), need.bytes)).collect();
        assert_eq!(devices, [("cpu", 2 * bytes), ("gpu", bytes)]);
    }

    #[test]
    fn drafters_take_memory_too() {
        let model = Model::built_in().unwrap();
        let bytes = engine(Device::Cpu).memory_bytes(&model, None);
        let drafter = DrafterMemory { weights: 7, caches: Vec::new() };
        let beside = placements(&[EngineOptions { drafter, ..engine(Device::Cpu) }], &model, 0, None);
        assert_eq!(beside[0][0].bytes, bytes + 7);
        let apart = placements(&[engine(Device::Cpu)], &model, 0, Some((&model, &Device::Cuda(1))));
        let devices: Vec<_> = apart[0].iter().map(|need| (need.device.as_str(), need.bytes)).collect();
        assert_eq!(devices, [("cpu", bytes), ("cuda:1", bytes)]);
    }

    #[test]
    fn gpus_that_share_a_replica_have_a_part_each() {
        let model = Model::built_in().unwrap();
        let bytes = engine(Device::Cuda(2)).memory_bytes(&model, None);
        let two = needs(&[EngineOptions { n_ranks: 2, ..engine(Device::Cuda(2)) }], &model);
        let parts: Vec<_> = two.iter().map(|need| (need.device.as_str(), need.bytes)).collect();
        assert_eq!(parts, [("cuda:2", bytes.div_ceil(2)), ("cuda:3", bytes.div_ceil(2))]);
    }

    #[test]
    fn auto_may_take_any_gpu_with_enough_memory() {
        let (model, engine) = (Model::built_in().unwrap(), engine(Device::Auto));
        let bytes = engine.memory_bytes(&model, None);
        let card = |ordinal, memory| GpuMemory { ordinal, memory };
        let takes = |gpus: &[GpuMemory]| gpus_with_room(&engine, &model, gpus);
        // The model takes exactly nine tenths of the GPU's memory.
        let enough = bytes.div_ceil(9) * 10;
        assert_eq!(takes(&[card(0, enough - 20), card(1, enough), card(2, 1 << 40)]), [1, 2]);
        assert!(takes(&[card(0, bytes)]).is_empty() && takes(&[]).is_empty());
    }

    #[test]
    fn auto_runs_where_memory_is_reserved() {
        let on = |device: &str| vec![MemoryNeed { device: device.into(), bytes: 1, capacity: None }];
        let device = |asked, placement: &str| placed(&engine(asked), &on(placement)).device;
        assert_eq!(device(Device::Auto, "cuda:3"), Device::Cuda(3));
        // `auto` may still be a GPU through wgpu, for which no memory is reserved.
        assert_eq!(device(Device::Auto, "cpu"), Device::Auto);
        assert_eq!(device(Device::Cpu, "cuda:3"), Device::Cpu);
        assert_eq!(placed(&engine(Device::Auto), &Placement::new()).device, Device::Auto);
    }
}
