//! [`DraftFile`]: the file of a drafter, which is a model by itself or needs its target.

use std::path::Path;
use std::sync::Arc;

use metal_attention_gguf::GgufFile;
use metal_attention_model::LoadedDflash;

use super::{AssistantDrafter, DflashDrafter, DraftModel, DraftModelOptions, Drafter, DrafterKind, HeadDrafter};
use crate::backends::BackendPass;
use crate::{Device, EngineOptions, Error, Model, ModelOptions};

/// An open file of a drafter, by its architecture; clones share it.
#[derive(Debug, Clone)]
pub enum DraftFile {
    /// A model that generates text by itself ([`DraftModel`]).
    Model(Model),
    /// EAGLE-3 (`eagle3`).
    Eagle3(Arc<GgufFile>),
    /// `DFlash` (`dflash`).
    DFlash(Arc<GgufFile>),
    /// The drafter of Gemma 4 (`gemma4-assistant`).
    Gemma4Assistant(Arc<GgufFile>),
}

/// Why a draft file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DraftFileError {
    /// Another kind of drafter was requested than the file has.
    #[error(
        "the draft file has a drafter of the kind {found:?}, but {requested:?} was requested: use \"auto\" or {found:?}",
        found = found.name(), requested = requested.name()
    )]
    OtherKind {
        /// What was requested.
        requested: DrafterKind,
        /// What the file has.
        found: DrafterKind,
    },
    /// A kind of drafter was requested that needs a file of its own.
    #[error("the drafter {:?} is in a file of its own: name that file, too (--model-draft FILE)", kind.name())]
    NoFile {
        /// What was requested.
        kind: DrafterKind,
    },
    /// A device was named for a drafter that runs on that of its target.
    #[error(
        "this drafter reads the model's hidden states, so that it runs on the model's device: leave its device out"
    )]
    OwnDevice,
}

impl DraftFile {
    /// Opens a GGUF file (any part of a split one). The file must not change meanwhile, as with [`Model::open`].
    ///
    /// # Errors
    /// As of [`Model::open`]; tensors of a drafter that needs its target are looked for when [it is set up](Self::drafter).
    pub fn open(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Self, Error> {
        Self::from_gguf(Model::read_gguf(path, options)?, options)
    }

    /// The drafter of an open file.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn from_gguf(gguf: GgufFile, options: &ModelOptions) -> Result<Self, Error> {
        Ok(match gguf.metadata().str("general.architecture")? {
            Some("eagle3") => Self::Eagle3(Arc::new(gguf)),
            Some("dflash") => Self::DFlash(Arc::new(gguf)),
            Some("gemma4-assistant") => Self::Gemma4Assistant(Arc::new(gguf)),
            Some(_) | None => Self::Model(Model::from_gguf(gguf, options)?),
        })
    }

    /// The kind of its drafter.
    pub fn kind(&self) -> DrafterKind {
        match self {
            Self::Model(_) => DrafterKind::Draft,
            Self::Eagle3(_) => DrafterKind::Eagle3,
            Self::DFlash(_) => DrafterKind::DFlash,
            Self::Gemma4Assistant(_) => DrafterKind::Gemma4Assistant,
        }
    }

    /// The model that it is by itself; `None` if it needs its target.
    pub fn model(&self) -> Option<&Model> {
        match self {
            Self::Model(model) => Some(model),
            Self::Eagle3(_) | Self::DFlash(_) | Self::Gemma4Assistant(_) => None,
        }
    }

    /// The file.
    pub fn gguf(&self) -> &GgufFile {
        match self {
            Self::Model(model) => model.gguf(),
            Self::Eagle3(gguf) | Self::DFlash(gguf) | Self::Gemma4Assistant(gguf) => gguf,
        }
    }

    /// Sets up the drafter for `target`, whose forward pass is `pass`, to which an assistant is attached. `options`: those of `pass`.
    /// `device`: the device of a [`Model`](Self::Model), `None`: the one of `options`; the others run on that of `pass`.
    ///
    /// # Errors
    /// The drafter does not suit the target, is damaged, or does not fit in memory.
    pub fn drafter(
        &self,
        target: &Model,
        pass: &mut dyn BackendPass,
        options: &EngineOptions,
        device: Option<&Device>,
    ) -> Result<Box<dyn Drafter>, Error> {
        if self.model().is_none() && device.is_some() {
            return Err(DraftFileError::OwnDevice.into());
        }
        match self {
            Self::Model(draft) => {
                let device = device.unwrap_or(&options.device).clone();
                let n_ctx = Some(pass.n_ctx().min(draft.spec().n_ctx_train));
                let n_cache = Some(pass.cache_pages().n_positions());
                let options = EngineOptions { device, n_ctx, n_cache, n_ranks: 1, ..options.clone() };
                Ok(Box::new(DraftModel::new(target, draft, &options, DraftModelOptions::default())?))
            }
            Self::Eagle3(gguf) => Ok(Box::new(HeadDrafter::of_eagle3(gguf, target, pass, options)?)),
            Self::DFlash(gguf) => {
                let loaded = LoadedDflash::load(gguf, target.loaded())?;
                Ok(Box::new(DflashDrafter::beside(&loaded, pass, options)?))
            }
            Self::Gemma4Assistant(gguf) => Ok(Box::new(AssistantDrafter::attach(target, gguf, pass, options)?)),
        }
    }
}
