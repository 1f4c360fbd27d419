//! Pictures of all formats. The data shows red, green, blue and white quarters, 24 x 16 pixels in all.

use metal_attention_pictures::{Limits, Picture, PictureError};

use super::data;

fn decode(name: &str) -> Picture {
    Picture::decode(&data(name), &Limits::default()).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The colours in the middle of the quarters: upper left, upper right, lower left, lower right.
fn quarters(picture: &Picture) -> [[u8; 3]; 4] {
    let (width, height) = (picture.width(), picture.height());
    [(1, 1), (3, 1), (1, 3), (3, 3)].map(|(x, y)| {
        let x = width * x / 4;
        picture.row(height * y / 4)[x * 3..x * 3 + 3].try_into().unwrap()
    })
}

const RED: [u8; 3] = [200, 40, 40];
const GREEN: [u8; 3] = [40, 160, 60];
const BLUE: [u8; 3] = [30, 60, 200];
const WHITE: [u8; 3] = [220; 3];

fn assert_near(name: &str, expected: [[u8; 3]; 4], tolerance: u8) -> Picture {
    let picture = decode(name);
    let found = quarters(&picture);
    let bytes = found.as_flattened().iter().zip(expected.as_flattened());
    assert!(bytes.into_iter().all(|(a, b)| a.abs_diff(*b) <= tolerance), "{name}: {found:?}");
    picture
}

#[test]
fn lossless_formats_are_exact() {
    for name in ["alpha.png", "lossless.webp", "animated.gif", "palette.bmp", "palette.png"] {
        let picture = assert_near(name, [RED, GREEN, BLUE, WHITE], 0);
        assert_eq!((picture.width(), picture.height()), (24, 16), "{name}");
    }
}

#[test]
fn lossy_formats_are_near() {
    assert_near("lossy.webp", [RED, GREEN, BLUE, WHITE], 8);
    // The upper half of its first frame is transparent, and its encoder stored no colours there.
    assert_near("animated.webp", [[0; 3], [0; 3], BLUE, WHITE], 8);
    // Its ink takes the place of its colours: values of CMYK files are inverted, and here there is no black.
    assert_near("cmyk.jpg", [RED, GREEN, BLUE, WHITE], 8);
    // ITU-R 601-2 luma.
    assert_near("grey.jpg", [[88; 3], [113; 3], [67; 3], [220; 3]], 8);
}

#[test]
fn pictures_are_turned_upright() {
    // Stored lying, shown turned clockwise.
    let picture = assert_near("turned.jpg", [BLUE, RED, WHITE, GREEN], 8);
    assert_eq!((picture.width(), picture.height()), (16, 24));
}

#[test]
fn colours_under_transparent_pixels_stay() {
    let picture = decode("alpha.png");
    // The upper half of the file is transparent.
    assert_eq!(picture.row(0)[..3], RED);
}

#[test]
fn samples_of_16_bits_lose_the_lower_8() {
    let picture = decode("16-bit.png");
    let first: Vec<_> = picture.rgb().iter().step_by(3).copied().collect();
    assert_eq!(first, [0x00, 0x12, 0x23, 0x34, 0x45, 0x56, 0x67, 0x78]);
    assert!(picture.rgb().as_chunks::<3>().0.iter().all(|[r, g, b]| r == g && g == b));
}

/// A BMP file of one row, or several, with a bitmap header of 40 bytes.
fn bmp(width: i32, height: i32, bits: u16, compression: u32, rest: &[u8]) -> Vec<u8> {
    let masks = if compression == 3 { 12 } else { 0 };
    let mut file = b"BM\0\0\0\0\0\0\0\0".to_vec();
    file.extend(u32::to_le_bytes(54 + masks));
    file.extend(u32::to_le_bytes(40));
    file.extend([width, height].map(i32::to_le_bytes).as_flattened());
    file.extend([1, bits].map(u16::to_le_bytes).as_flattened());
    file.extend([compression, 0, 0, 0, 0, 0].map(u32::to_le_bytes).as_flattened());
    file.extend(rest);
    file
}

#[test]
fn bitmaps_of_all_depths_are_read() {
    let read = |file: &[u8]| Picture::decode(file, &Limits::default()).unwrap().rgb().to_vec();
    // 24 bits: rows from the bottom, padded to 4 bytes.
    let rows = [1, 2, 3, 0, 4, 5, 6, 0];
    assert_eq!(read(&bmp(1, 2, 24, 0, &rows)), [6, 5, 4, 3, 2, 1]);
    assert_eq!(read(&bmp(1, -2, 24, 0, &rows)), [3, 2, 1, 6, 5, 4]);
    assert_eq!(read(&bmp(1, 1, 32, 0, &[1, 2, 3, 99])), [3, 2, 1]);
    // 5 bits a channel, and masks of 5, 6 and 5 bits.
    assert_eq!(read(&bmp(1, 1, 16, 0, &[0x1f, 0x40, 0, 0])), [132, 0, 255]);
    let masks = [0xf800, 0x7e0, 0x1f].map(u32::to_le_bytes).concat();
    assert_eq!(read(&bmp(1, 1, 16, 3, &[&masks[..], &[0xe0, 0x07, 0, 0]].concat())), [0, 255, 0]);
    // The header of OS/2, and one bit a pixel.
    let core = b"BM\0\0\0\0\0\0\0\0\x20\0\0\0\x0c\0\0\0\x03\0\x01\0\x01\0\x01\0\x01\x02\x03\x04\x05\x06\xa0\0\0\0";
    assert_eq!(read(core), [6, 5, 4, 3, 2, 1, 6, 5, 4]);
    let error = Picture::decode(&bmp(1, 1, 8, 1, &[0; 9]), &Limits::default()).unwrap_err();
    assert_eq!(error, PictureError::UnsupportedFormat { format: "run-length encoded BMP" });
}

#[test]
fn a_first_frame_smaller_than_its_gif_lies_on_black() {
    // Logical screen of 24 x 16, whose first frame becomes 24 x 8 at row 8: its data is longer than needed.
    let mut file = data("animated.gif");
    let frame = file.windows(10).position(|bytes| bytes == b",\0\0\0\0\x18\0\x10\0\x00").unwrap();
    file[frame + 3] = 8;
    file[frame + 7] = 8;
    let picture = Picture::decode(&file, &Limits::default()).unwrap();
    assert_eq!(quarters(&picture), [[0; 3], [0; 3], RED, GREEN]);
    file[frame + 3] = 9;
    assert!(matches!(Picture::decode(&file, &Limits::default()), Err(PictureError::Damaged { format: "GIF", .. })));
}

#[test]
fn other_files_are_refused_by_name() {
    let error = |bytes: &[u8]| Picture::decode(bytes, &Limits::default()).unwrap_err().to_string();
    assert_eq!(error(b""), "the picture file is empty: send the file's bytes");
    assert_eq!(error(b"\0\0\0\x1cftypheic...."), "HEIC files are not read: save the picture as JPEG or PNG");
    assert_eq!(
        error(b"{\"error\": 404}"),
        "not a picture: the file starts with \"{\\\"error\\\"\"; JPEG, PNG, WebP, BMP and GIF files are read"
    );
}
