//! Flags for the tensor types of a file that is written: the recipe and exceptions.

use metal_attention::gguf::{Metadata, TensorDecl, TensorType};
use metal_attention::{Recipe, TypeChoices};

/// Finds the recipe called `name`. The error is for clap.
pub fn recipe(name: &str) -> Result<&'static Recipe, String> {
    let known = || Recipe::all().iter().map(Recipe::name).collect::<Vec<_>>().join(", ");
    Recipe::named(name).ok_or_else(|| format!("unknown recipe; known are {}", known()))
}

/// The flags that choose types in addition to the recipe.
#[derive(clap::Args)]
pub struct TypeArgs {
    /// Type of the embedding table
    #[arg(long, value_name = "TYPE")]
    embd_type: Option<TensorType>,

    /// Type of the output head; of the embedding table, too, where the model has one table for both
    #[arg(long, value_name = "TYPE")]
    output_type: Option<TensorType>,

    /// Give all matrices, the embedding table and the output head too, the recipe's main type
    #[arg(long)]
    pure: bool,
}

impl TypeArgs {
    /// Sets the types of `tensors` by the recipe and the flags, and records the recipe in `metadata`. `importance` tells whether
    /// an importance matrix is given.
    pub fn apply(&self, recipe: &Recipe, importance: bool, metadata: &mut Metadata, tensors: &mut [TensorDecl]) {
        let choices = TypeChoices { embedding: self.embd_type, head: self.output_type, pure: self.pure, importance };
        let types = recipe.types(metadata, tensors, &choices);
        for (tensor, ty) in tensors.iter_mut().zip(types) {
            tensor.ty = ty;
        }
        metadata.set("general.quantization_version", 2u32);
        metadata.set("general.file_type", recipe.file_type());
    }
}
