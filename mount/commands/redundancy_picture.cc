// SPDX-License-Identifier: Apache-2.0
//
// The pictures of redundancy_report.h: bars of bytes, and a square of who shares with whom.

#include <fmt/format.h>

#include <algorithm>

#include "core/base/strings.h"
#include "mount/commands/redundancy_report.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

constexpr Colour kText{40, 40, 48};
constexpr Colour kOnce{96, 125, 176};
constexpr Colour kAgain{217, 95, 2};
constexpr Colour kPaper{226, 229, 235};
constexpr int kEdge = 16, kLine = 20, kBarHeight = 17, kBarLength = 420;
constexpr int kLabelScale = 2, kLabelLetter = kLabelScale * Picture::kLetterWidth;
constexpr size_t kLabelLetters = 40;
constexpr size_t kMostBars = 64;     // of files
constexpr size_t kMostSquares = 64;  // a side
constexpr int kSquare = 12;

// A bar: what is there once, and what is there again.
struct Bar {
  std::string label;
  uint64_t once = 0, again = 0;
  std::string Numbers() const { return StrCat(HumanBytes(once), " + ", HumanBytes(again)); }
};

std::string Shortened(const std::string& text) {
  return text.size() <= kLabelLetters ? text : ".." + text.substr(text.size() - kLabelLetters + 2);
}

// Bars below each other, and where the next thing goes.
class BarSheet {
 public:
  void Add(std::string heading, std::vector<Bar> bars) {
    for (Bar& bar : bars) {
      bar.label = Shortened(bar.label);
      widest_ = std::max(widest_, bar.label.size());
      numbers_ = std::max(numbers_, bar.Numbers().size());
    }
    parts_.emplace_back(std::move(heading), std::move(bars));
  }
  int width() const {
    return 3 * kEdge + BarX() + kBarLength + static_cast<int>(numbers_) * kLabelLetter;
  }
  int height() const {
    int lines = 2;
    for (const auto& [heading, bars] : parts_) lines += 2 + static_cast<int>(bars.size());
    return lines * kLine;
  }
  // Returns the height that it took.
  void Draw(Picture& picture) const {
    int y = 2 * kLine;
    for (const auto& [heading, bars] : parts_) {
      picture.Text(kEdge, y, heading, kText, kLabelScale);
      y += kLine;
      uint64_t longest = 1;
      for (const Bar& bar : bars) longest = std::max(longest, bar.once + bar.again);
      for (const Bar& bar : bars) {
        DrawBar(picture, bar, longest, y);
        y += kLine;
      }
      y += kLine;
    }
  }

 private:
  int BarX() const { return kEdge + static_cast<int>(widest_ + 1) * kLabelLetter; }
  void DrawBar(Picture& picture, const Bar& bar, uint64_t longest, int y) const {
    const auto length = [&](uint64_t bytes) {
      return static_cast<int>(static_cast<double>(bytes) / static_cast<double>(longest) *
                              kBarLength);
    };
    const int x = BarX(), once = length(bar.once), again = length(bar.once + bar.again) - once;
    picture.Text(kEdge, y, bar.label, kText, kLabelScale);
    picture.Rectangle(x, y, kBarLength, kBarHeight, kPaper);
    if (once > 0) picture.Rectangle(x, y, once, kBarHeight, kOnce);
    if (again > 0) picture.Rectangle(x + once, y, again, kBarHeight, kAgain);
    picture.Text(x + kBarLength + kEdge, y, bar.Numbers(), kText, kLabelScale);
  }

  size_t widest_ = 1, numbers_ = 1;
  std::vector<std::pair<std::string, std::vector<Bar>>> parts_;
};

Colour Mixed(Colour low, Colour high, double share) {
  const auto mix = [share](uint8_t a, uint8_t b) {
    return static_cast<uint8_t>(a + (b - a) * share);
  };
  return {mix(low.red, high.red), mix(low.green, high.green), mix(low.blue, high.blue)};
}

// How much each two of the first files share, of what the one with fewer bytes stores.
void DrawPairs(Picture& picture, const RedundancyReport& report, size_t side, int top) {
  picture.Text(kEdge, top, "which files hold the same: darker is more, by number in the list above",
               kText, kLabelScale);
  top += kLine;
  for (size_t a = 0; a < side; ++a)
    for (size_t b = 0; b < side; ++b)
      picture.Rectangle(kEdge + static_cast<int>(a) * kSquare, top + static_cast<int>(b) * kSquare,
                        kSquare - 1, kSquare - 1, a == b ? kOnce : kPaper);
  for (const SharedPair& pair : *report.pairs) {
    if (pair.a >= side || pair.b >= side) continue;
    const uint64_t smaller =
        std::max<uint64_t>(std::min(report.files[pair.a].stored, report.files[pair.b].stored), 1);
    const double share =
        std::clamp(static_cast<double>(pair.bytes) / static_cast<double>(smaller), 0.1, 1.0);
    for (const auto& [x, y] : {std::pair(pair.a, pair.b), std::pair(pair.b, pair.a)})
      picture.Rectangle(kEdge + static_cast<int>(x) * kSquare, top + static_cast<int>(y) * kSquare,
                        kSquare - 1, kSquare - 1, Mixed(kPaper, kAgain, share));
  }
}

}  // namespace

Picture DrawRedundancy(const StepModel& step, const RedundancyReport& report,
                       const std::string& title) {
  BarSheet sheet;
  std::vector<Bar> classes, files;
  for (const ClassRedundancy& one : report.classes)
    classes.push_back({one.name, one.unique, one.stored - one.unique});
  for (const FileRedundancy& file : report.files) {
    if (files.size() == kMostBars) break;
    const uint64_t again = file.stored > file.kept ? file.stored - file.kept : 0;
    files.push_back({step.blob(file.blob).path, file.kept, again});
  }
  sheet.Add("classes: bytes that are needed once + those stored again", std::move(classes));
  sheet.Add(StrCat("files: bytes to keep + to drop",
                   report.files.size() > kMostBars ? StrCat(", the first ", kMostBars) : ""),
            std::move(files));
  const bool square = report.pairs && !report.pairs->empty();
  const size_t side = square ? std::min(report.files.size(), kMostSquares) : 0;
  const int bars = sheet.height();
  const int squares = square ? 2 * kLine + static_cast<int>(side) * kSquare : 0;
  const int letters = static_cast<int>(title.size()) * kLabelLetter + 2 * kEdge;
  Picture picture(std::max({sheet.width(), letters, 2 * kEdge + static_cast<int>(side) * kSquare,
                            72 * kLabelLetter}),
                  bars + squares + kEdge);
  picture.Text(kEdge, kEdge / 2, title, kText, kLabelScale);
  sheet.Draw(picture);
  if (square) DrawPairs(picture, report, side, bars);
  return picture;
}

Picture DrawUnchanged(const std::vector<ChainStep>& steps, const std::vector<StepSince>& since) {
  BarSheet sheet;
  for (size_t i = 0; i < since.size(); ++i) {
    std::vector<Bar> bars;
    for (const ClassSince& one : since[i].classes)
      bars.push_back({one.name, one.bytes - one.unchanged, one.unchanged});
    sheet.Add(Shortened(steps[i + 1].name), std::move(bars));
  }
  const std::string title = "bytes that changed since the step before + those that did not";
  Picture picture(
      std::max(sheet.width(), static_cast<int>(title.size()) * kLabelLetter + 2 * kEdge),
      sheet.height() + kEdge);
  picture.Text(kEdge, kEdge / 2, title, kText, kLabelScale);
  sheet.Draw(picture);
  return picture;
}

}  // namespace ckptfs
