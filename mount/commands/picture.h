// SPDX-License-Identifier: Apache-2.0
//
// A Picture is rectangles and lines of text, written as SVG or as PNG.  It needs neither a font
// file nor a library of pictures: PNG has letters of its own, 5 by 7 dots.
//
// Thread safety: values; one thread at a time.
// Units: pixels, from the top left corner.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ckptfs {

struct Colour {
  uint8_t red = 0, green = 0, blue = 0;
};

class Picture {
 public:
  static constexpr int kLetterWidth = 6;  // of a letter with its gap, at scale 1
  static constexpr int kLetterHeight = 8;

  Picture(int width, int height) : width_(width), height_(height) {}

  void Rectangle(int x, int y, int width, int height, Colour fill);
  // `text` is made printable; letters beyond ASCII are shown as '?' in PNG.
  void Text(int x, int y, std::string_view text, Colour colour, int scale = 2);

  std::string Svg() const;
  std::string Png() const;

 private:
  struct Shape {
    int x = 0, y = 0, width = 0, height = 0;
    Colour colour;
    std::string text;  // empty: a rectangle
    int scale = 1;
  };
  const int width_;
  const int height_;
  std::vector<Shape> shapes_;
};

}  // namespace ckptfs
