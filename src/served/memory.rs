//! How much memory a model takes of which device.

use std::sync::OnceLock;

use metal_attention::{Device, EngineOptions, Model, available_memory};
use metal_attention_server::http::{MemoryNeed, Placement};

/// Where `model` can run with a replica for each of `engines`: `auto` may be any card with room for it where that is empty, and
/// is the CPU where there is none.
pub fn placements(engines: &[EngineOptions], model: &Model) -> Vec<Placement> {
    let auto = engines.iter().find(|engine| engine.device == Device::Auto);
    let cards = auto.map_or_else(Vec::new, |engine| cards_with_room(engine, model, cards_for(model)));
    if cards.is_empty() {
        return vec![needs(engines, model)];
    }
    let on_card = |card| engines.iter().map(|engine| with_auto(engine, Device::Cuda(card))).collect::<Vec<_>>();
    cards.into_iter().map(|card| needs(&on_card(card), model)).collect()
}

/// The options for the device that memory is set aside of, which is a card where `auto` found some.
pub fn placed(engine: &EngineOptions, placement: &Placement) -> EngineOptions {
    let device = placement.iter().find_map(|need| need.device.parse().ok());
    match device {
        Some(card @ Device::Cuda(_)) => with_auto(engine, card),
        _ => engine.clone(),
    }
}

fn with_auto(engine: &EngineOptions, device: Device) -> EngineOptions {
    let device = if engine.device == Device::Auto { device } else { engine.device.clone() };
    EngineOptions { device, ..engine.clone() }
}

/// The memory that `model` takes with a replica for each of `engines`, of each device once.
fn needs(engines: &[EngineOptions], model: &Model) -> Placement {
    let mut needs = Placement::new();
    for need in engines.iter().flat_map(|engine| of_replica(engine, model)) {
        match needs.iter_mut().find(|known| known.device == need.device) {
            Some(known) => known.bytes = known.bytes.saturating_add(need.bytes),
            None => needs.push(need),
        }
    }
    needs
}

fn of_replica(engine: &EngineOptions, model: &Model) -> Vec<MemoryNeed> {
    match &engine.device {
        Device::Cpu | Device::Auto => vec![on_cpu(engine, model)],
        Device::Cuda(first) => on_cards(engine, model, *first),
        // A GPU through wgpu does not tell.
        _ => {
            let bytes = engine.memory_bytes(model, None);
            vec![MemoryNeed { device: engine.device.to_string(), bytes, capacity: None }]
        }
    }
}

fn on_cpu(engine: &EngineOptions, model: &Model) -> MemoryNeed {
    // What there was before any model was loaded.
    static CAPACITY: OnceLock<Option<u64>> = OnceLock::new();
    let free = available_memory();
    let capacity = *CAPACITY.get_or_init(|| free);
    MemoryNeed { device: "cpu".to_owned(), bytes: engine.memory_bytes(model, free), capacity }
}

/// An NVIDIA GPU.
struct Card {
    ordinal: usize,
    /// Bytes.
    memory: u64,
}

/// The memory of the cards from `first` on that share a replica, each with its part of weights and KV cache.
fn on_cards(engine: &EngineOptions, model: &Model, first: usize) -> Vec<MemoryNeed> {
    // The driver and kernels take some.
    const PERCENT: u64 = 95;
    let n_cards = engine.n_ranks.max(1);
    let ordinals = first..first.saturating_add(n_cards);
    let capacity =
        |ordinal| cards().iter().find(|card| card.ordinal == ordinal).map(|card| card.memory / 100 * PERCENT);
    let free = ordinals.clone().map(capacity).sum();
    let bytes = engine.memory_bytes(model, free).div_ceil(n_cards as u64);
    let need = |ordinal| MemoryNeed { device: format!("cuda:{ordinal}"), bytes, capacity: capacity(ordinal) };
    ordinals.map(need).collect()
}

/// Those of `cards` with room for `model`, a tenth of their memory kept free, as `--device auto` takes them.
fn cards_with_room(engine: &EngineOptions, model: &Model, cards: &[Card]) -> Vec<usize> {
    let has_room = |card: &&Card| {
        let most = card.memory - card.memory / 10;
        engine.memory_bytes(model, Some(most)) <= most
    };
    cards.iter().filter(has_room).map(|card| card.ordinal).collect()
}

/// The NVIDIA GPUs that can run `model`.
#[cfg(feature = "cuda")]
fn cards_for(model: &Model) -> &'static [Card] {
    if metal_attention::CudaForwardPass::supports(model.spec()).is_ok() { cards() } else { &[] }
}

#[cfg(not(feature = "cuda"))]
fn cards_for(_: &Model) -> &'static [Card] {
    &[]
}

/// The NVIDIA GPUs that the kernels run on.
#[cfg(feature = "cuda")]
fn cards() -> &'static [Card] {
    static CARDS: OnceLock<Vec<Card>> = OnceLock::new();
    CARDS.get_or_init(|| {
        let all = metal_attention::cuda_summaries().unwrap_or_default();
        let new = all.into_iter().filter(metal_attention::CudaSummary::is_new_enough);
        new.map(|card| Card { ordinal: card.ordinal, memory: card.memory }).collect()
    })
}

#[cfg(not(feature = "cuda"))]
fn cards() -> &'static [Card] {
    &[]
}

#[cfg(test)]
mod tests {
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
    fn cards_that_share_a_replica_have_a_part_each() {
        let model = Model::built_in().unwrap();
        let bytes = engine(Device::Cuda(2)).memory_bytes(&model, None);
        let two = needs(&[EngineOptions { n_ranks: 2, ..engine(Device::Cuda(2)) }], &model);
        let parts: Vec<_> = two.iter().map(|need| (need.device.as_str(), need.bytes)).collect();
        assert_eq!(parts, [("cuda:2", bytes.div_ceil(2)), ("cuda:3", bytes.div_ceil(2))]);
    }

    #[test]
    fn auto_may_take_any_card_with_room() {
        let (model, engine) = (Model::built_in().unwrap(), engine(Device::Auto));
        let bytes = engine.memory_bytes(&model, None);
        let card = |ordinal, memory| Card { ordinal, memory };
        let takes = |cards: &[Card]| cards_with_room(&engine, &model, cards);
        // Nine tenths of it are enough, and no less.
        let enough = bytes.div_ceil(9) * 10;
        assert_eq!(takes(&[card(0, enough - 20), card(1, enough), card(2, 1 << 40)]), [1, 2]);
        assert!(takes(&[card(0, bytes)]).is_empty() && takes(&[]).is_empty());
    }

    #[test]
    fn auto_runs_where_memory_is_set_aside() {
        let on = |device: &str| vec![MemoryNeed { device: device.into(), bytes: 1, capacity: None }];
        let device = |asked, placement: &str| placed(&engine(asked), &on(placement)).device;
        assert_eq!(device(Device::Auto, "cuda:3"), Device::Cuda(3));
        // It may be a GPU that does not tell.
        assert_eq!(device(Device::Auto, "cpu"), Device::Auto);
        assert_eq!(device(Device::Cpu, "cuda:3"), Device::Cpu);
        assert_eq!(placed(&engine(Device::Auto), &Placement::new()).device, Device::Auto);
    }
}
