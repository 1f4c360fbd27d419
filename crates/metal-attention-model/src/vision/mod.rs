//! Encoders of pictures: the vision towers that `mmproj` files hold, with the projectors that turn their results into rows of
//! embeddings for a text model.
//!
//! An encoder is data: a list of [`Stage`]s, which a family's file under `architectures/vision/` makes from the metadata and the
//! tensors of a file. A backend implements [`EncoderOps`], some twenty operations over rows, and [`Encoder::run`] calls them in
//! the order of the stages. What depends on the size of a picture alone (positions, angles, orders of rows, windows) is computed
//! on the host, from the [`Layout`] of the rows.

mod geometry;
mod kept;
mod load;
mod model;
mod ops;
mod positions;
mod relative;
mod run;
mod shapes;
mod stages;
mod work;

pub use crate::architectures::vision::projectors;
pub use geometry::{Layout, MergeOrder, NO_ROW, Place, RowOrder};
pub use kept::KeptRows;
pub use model::{PictureAttention, PictureMarkers, PromptPart, TileMarkers, VisionModel};
pub use ops::{AttentionSegment, EncoderOps, PrepareEncoder, hidden, split_columns};
pub use positions::{Angles, Axis, Interpolation, PositionTable};
pub use run::{EncodedPicture, Pixels};
pub use shapes::{PictureFamily, PictureShape};
pub use stages::{
    Block, Clamp, Colours, Encoder, EncoderActivation, EncoderAttention, EncoderFeedForward, EncoderLinear,
    EncoderNorm, EncoderTypes, FileWeights, PatchOrder, PatchSpec, QueryAttention, RelativeScores, Resampler, Stage,
};
pub use work::EncoderWork;

pub(crate) use load::EncoderReader;
