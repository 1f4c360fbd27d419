//! Damaged files, and files that claim more than they have.

use metal_attention_pictures::{ErrorKind, Limits, Picture, PictureError};

use super::{Random, data};

const FILES: [&str; 12] = [
    "16-bit.png",
    "alpha.png",
    "animated.gif",
    "animated.webp",
    "cmyk.jpg",
    "grey.jpg",
    "lossless.webp",
    "lossy.webp",
    "palette.bmp",
    "palette.png",
    "small.png",
    "turned.jpg",
];

#[test]
fn truncated_files_are_errors() {
    for name in FILES {
        let file = data(name);
        // Of the animation only the first frame must be there, which ends after the middle of the file.
        let end = if name == "animated.gif" { file.len() / 2 } else { file.len() };
        for len in 0..end {
            let result = Picture::decode(&file[..len], &Limits::default());
            let error = result.expect_err(&format!("{name} cut to {len} of {} bytes", file.len()));
            assert_eq!(error.kind(), ErrorKind::Picture);
        }
    }
}

#[test]
fn damaged_files_never_panic() {
    let mut random = Random(11);
    let limits = Limits { max_bytes: 1 << 20, max_pixels: 1 << 20 };
    for name in FILES {
        let file = data(name);
        for _ in 0..2000 {
            let mut damaged = file.clone();
            for _ in 0..random.up_to(4) {
                let at = random.up_to(damaged.len()) - 1;
                damaged[at] = random.next() as u8;
            }
            let _ = Picture::decode(&damaged, &limits);
        }
    }
}

/// `file` with the bytes `new` at `at`.
fn with(mut file: Vec<u8>, at: usize, new: &[u8]) -> Vec<u8> {
    file[at..at + new.len()].copy_from_slice(new);
    file
}

#[test]
fn huge_sizes_are_refused_before_memory_is_allocated() {
    let jpeg = data("turned.jpg");
    let frame = jpeg.windows(3).position(|bytes| bytes[..2] == [0xff, 0xc0] && bytes[2] == 0).unwrap();
    let gif = data("animated.gif");
    let mut png = data("alpha.png");
    png[16..24].copy_from_slice(&[0, 1, 0, 0, 0, 1, 0, 0]);
    let crc = crc32fast::hash(&png[12..29]);
    png[29..33].copy_from_slice(&crc.to_be_bytes());
    let lossy = data("lossy.webp");
    let lossless = data("lossless.webp");
    let vp8 = lossy.windows(4).position(|bytes| bytes == b"VP8 ").unwrap();
    let vp8l = lossless.windows(4).position(|bytes| bytes == b"VP8L").unwrap();
    let bmp = data("palette.bmp");
    for (file, format, size) in [
        (with(jpeg, frame + 5, &[0xff; 4]), "JPEG", (65535, 65535)),
        (with(gif, 6, &[0xff; 4]), "GIF", (65535, 65535)),
        (png, "PNG", (65536, 65536)),
        (with(lossy, vp8 + 14, &[0xff; 4]), "WebP", (16383, 16383)),
        (with(lossless, vp8l + 9, &[0xff, 0xff, 0xff, 0x0f]), "WebP", (16384, 16384)),
        (with(bmp, 18, &[0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0x80]), "BMP", (0x7fff_ffff, 0x8000_0000)),
    ] {
        let limit = Limits::default().max_pixels;
        let expected = PictureError::TooManyPixels { format, width: size.0, height: size.1, limit };
        assert_eq!(Picture::decode(&file, &Limits::default()), Err(expected));
    }
}

#[test]
fn limits_hold_exactly() {
    let file = data("alpha.png");
    let limits = Limits { max_bytes: file.len(), max_pixels: 24 * 16 };
    assert!(Picture::decode(&file, &limits).is_ok());
    let expected = PictureError::TooManyBytes { bytes: file.len(), limit: file.len() - 1 };
    assert_eq!(Picture::decode(&file, &Limits { max_bytes: file.len() - 1, ..limits }), Err(expected));
    let expected = PictureError::TooManyPixels { format: "PNG", width: 24, height: 16, limit: 383 };
    assert_eq!(Picture::decode(&file, &Limits { max_pixels: 383, ..limits }), Err(expected));
}

#[test]
fn pictures_have_pixels() {
    for (width, height, bytes) in [(0, 0, 0), (0, 5, 0), (2, 2, 11), (usize::MAX, 2, 6), (usize::MAX, usize::MAX, 3)] {
        let expected = PictureError::WrongLength { width, height, bytes };
        assert_eq!(Picture::new(width, height, vec![0; bytes]), Err(expected));
    }
}
