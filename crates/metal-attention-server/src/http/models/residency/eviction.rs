//! Where a model can be loaded, and which other models are evicted for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{LoadUnit, Residency, ResidencyEntry, ResidencyPhase};
use crate::http::ApiError;
use crate::http::models::source::{MemoryNeed, Placement};

/// Whether requests use a model, and the time of its last use. The smallest value is evicted first.
type LastUse = (bool, Instant);

/// The models to evict for a model at a placement.
pub(super) struct EvictionPlan {
    /// Whether enough memory is free already.
    pub(super) is_free: bool,
    /// Whether enough is free after all retiring models and those of this plan are unloaded.
    is_enough: bool,
    /// The ids of the models to evict, in addition to those that are retiring.
    pub(super) to_evict: BTreeSet<u64>,
    /// The last use of the one of them that was used most recently.
    last_used: Option<LastUse>,
}

impl EvictionPlan {
    /// The cost of a plan; the smallest is best: free memory, then no further evictions, then models that were used
    /// least recently.
    fn cost(&self) -> (bool, bool, Option<LastUse>) {
        (!self.is_free, !self.is_enough, self.last_used)
    }
}

impl Residency {
    /// The first placement with enough free memory, else the one with the cheapest eviction plan; an error where no
    /// placement can have enough. `None`: there are no placements.
    pub(super) fn best_placement<'p>(
        &self,
        entries: &BTreeMap<u64, ResidencyEntry>,
        unit: &LoadUnit,
        placements: &'p [Placement],
    ) -> Result<Option<(&'p Placement, EvictionPlan)>, ApiError> {
        let mut best: Option<(&Placement, EvictionPlan)> = None;
        let mut why = None;
        for placement in placements {
            match self.eviction_plan(entries, unit, placement) {
                Ok(plan) if best.as_ref().is_none_or(|(_, known)| plan.cost() < known.cost()) => {
                    best = Some((placement, plan));
                }
                Ok(_) => {}
                Err(error) => why = why.or(Some(error)),
            }
        }
        match (best, why) {
            (None, Some(error)) => Err(error),
            (best, _) => Ok(best),
        }
    }

    /// The eviction plan for the model at the placement; an error where the model exceeds the capacity of a device, or
    /// where resident models leave too little of it.
    fn eviction_plan(
        &self,
        entries: &BTreeMap<u64, ResidencyEntry>,
        unit: &LoadUnit,
        placement: &Placement,
    ) -> Result<EvictionPlan, ApiError> {
        let mut plan = EvictionPlan { is_free: true, is_enough: true, to_evict: BTreeSet::new(), last_used: None };
        for need in placement {
            let Some(capacity) = self.capacity(need) else { continue };
            let MemoryNeed { device, bytes, .. } = need;
            if *bytes > capacity {
                return Err(too_large(unit, *bytes, device, capacity));
            }
            let sum = |counts: &dyn Fn(&ResidencyEntry) -> bool| -> u64 {
                entries.values().filter(|entry| counts(entry)).map(|entry| entry.bytes_on(device)).sum()
            };
            if sum(&|entry| entry.unit.resident && !entry.is_unloading()) + bytes > capacity {
                return Err(no_room(unit, *bytes, device, capacity));
            }
            let missing = (sum(&|_| true) + bytes).saturating_sub(capacity);
            plan.is_free &= missing == 0;
            let unloading = sum(&|entry| entry.is_unloading() || plan.to_evict.contains(&entry.unit.id));
            let mut missing = missing.saturating_sub(unloading);
            let mut candidates: Vec<_> =
                entries.values().filter_map(|entry| eviction_candidate(entry, device)).collect();
            candidates.retain(|(_, entry)| !plan.to_evict.contains(&entry.unit.id));
            candidates.sort_by_key(|(last_use, _)| *last_use);
            for (last_use, entry) in candidates {
                if missing == 0 {
                    break;
                }
                missing = missing.saturating_sub(entry.bytes_on(device));
                plan.to_evict.insert(entry.unit.id);
                plan.last_used = plan.last_used.max(Some(last_use));
            }
            // If this is not enough, models that are being loaded are evicted afterwards.
            plan.is_enough &= missing == 0;
        }
        Ok(plan)
    }
}

/// The model as a candidate for eviction from `device`, with its last use; `None`: it must stay or is not there.
fn eviction_candidate<'s>(entry: &'s ResidencyEntry, device: &str) -> Option<(LastUse, &'s ResidencyEntry)> {
    if entry.unit.resident || entry.bytes_on(device) == 0 {
        return None;
    }
    let ResidencyPhase::Loaded(model) = &entry.phase else { return None };
    (!model.retiring).then_some(((model.n_held > 0, model.last_used), entry))
}

fn too_large(unit: &LoadUnit, bytes: u64, device: &str, capacity: u64) -> ApiError {
    let message = format!(
        "the model {:?} needs {bytes} bytes of {device}, which has {capacity} for models: choose a smaller one, or a shorter \
         context",
        unit.name
    );
    ApiError::invalid(message).with_code("model_too_large")
}

fn no_room(unit: &LoadUnit, bytes: u64, device: &str, capacity: u64) -> ApiError {
    let message = format!(
        "the model {:?} needs {bytes} bytes of {device}, which has {capacity} for models, and those that stay loaded leave \
         too few: start the server without one of them",
        unit.name
    );
    ApiError::unavailable("no_room_for_model", message)
}
