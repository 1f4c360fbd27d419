//! The memory of a drafter before it is loaded.

use metal_attention_gguf::GgufFile;
use metal_attention_model::{DflashSpec, Eagle3Spec, ModelSpec};

use super::{DraftFile, DrafterKind};
use crate::{Device, Error};

/// What a drafter takes on its target's device, beside the target.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DrafterMemory {
    /// Bytes of weights that are not in the target's file.
    pub weights: u64,
    /// The models that have a KV cache of their own, of as many tokens as the target's.
    pub caches: Vec<ModelSpec>,
}

impl DrafterMemory {
    /// The memory of the drafter of `kind` for the model in the file `target`, of `spec`, which runs on `target_device`: that in the
    /// file `draft`, if there is one. `device`: that of a draft model; `None`: the target's. Nothing for prediction heads that are not
    /// supported.
    ///
    /// # Errors
    /// The drafter of `draft` is damaged, or does not suit the target.
    pub fn of(
        kind: DrafterKind,
        (target, spec): (&GgufFile, &ModelSpec),
        draft: Option<&DraftFile>,
        target_device: &Device,
        device: Option<&Device>,
    ) -> Result<Self, Error> {
        let Some(draft) = draft.filter(|_| kind != DrafterKind::Off) else {
            let caches = match kind {
                DrafterKind::Mtp | DrafterKind::Auto => ModelSpec::heads_from_gguf(target).unwrap_or_default(),
                DrafterKind::Off
                | DrafterKind::Ngram
                | DrafterKind::Draft
                | DrafterKind::Eagle3
                | DrafterKind::DFlash
                | DrafterKind::Gemma4Assistant => Vec::new(),
            };
            return Ok(Self { weights: 0, caches });
        };
        Self::of_draft_file(draft, spec, device.is_none_or(|device| device == target_device))
    }

    fn of_draft_file(draft: &DraftFile, target: &ModelSpec, is_beside: bool) -> Result<Self, Error> {
        let caches = match draft {
            DraftFile::Model(_) if !is_beside => return Ok(Self::default()),
            DraftFile::Model(model) => vec![model.spec().clone()],
            DraftFile::Eagle3(gguf) => vec![Eagle3Spec::from_gguf(gguf, target)?.layer],
            DraftFile::DFlash(gguf) => vec![DflashSpec::from_gguf(gguf, target)?.model],
            // It attends to the target's keys and values.
            DraftFile::Gemma4Assistant(_) => Vec::new(),
        };
        Ok(Self { weights: draft.gguf().tensor_bytes(), caches })
    }
}
