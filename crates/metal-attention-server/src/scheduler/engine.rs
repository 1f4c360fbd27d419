//! The thread that owns the forward pass.

use std::sync::Arc;

use metal_attention::tokenizer::Tokenizer;
use metal_attention::{ForwardPass, Model};

use super::SchedulerOptions;
use super::queue::Shared;

/// The forward pass and everything that runs on it.
pub(super) struct Engine {
    shared: Arc<Shared>,
}

impl Engine {
    pub fn new(
        _pass: Box<dyn ForwardPass>,
        _model: Arc<Model>,
        _tokenizer: &Tokenizer,
        shared: Arc<Shared>,
        _options: SchedulerOptions,
    ) -> Self {
        Self { shared }
    }

    /// Runs until the scheduler is closed.
    pub fn run(self) {
        loop {
            self.shared.sleep();
            self.shared.end();
            return;
        }
    }
}
