// SPDX-License-Identifier: Apache-2.0

#include "tests/conformance/view_format_suite.h"

#include <fstream>
#include <random>

#include "core/base/strings.h"
#include "core/blob/safetensors_header.h"
#include "core/view/plan_reader.h"
#include "formats/torch/torch_file.h"
#include "tests/support/open_torch_file.h"

namespace ckptfs {
namespace {

std::string ReadRange(const PlanReader& reader, uint64_t offset, size_t length) {
  std::string out(length, '?');
  auto got = reader.Read(offset, std::as_writable_bytes(std::span(out.data(), out.size())));
  EXPECT_TRUE(got.has_value()) << (got ? "" : got.error().message);
  out.resize(got.value_or(0));
  return out;
}

bool EndsWith(const std::string& path, std::string_view end) {
  return std::string_view(path).ends_with(end);
}

}  // namespace

void ViewFormatSuite::SetUp() {
  step_ = std::make_unique<TinyStep>(GetParam().step);
  format_ = GetParam().format();
  layout_ = Layout::Parse(GetParam().layout).value();
  auto view = format_->Open(ShownState::Of(step_->shared(), layout_));
  ASSERT_TRUE(view.has_value()) << view.error().message;
  view_ = *std::move(view);
}

std::vector<std::pair<std::string, uint64_t>> ViewFormatSuite::Files() {
  std::vector<std::pair<std::string, uint64_t>> files;
  Walk("", files);
  return files;
}

void ViewFormatSuite::Walk(const std::string& directory,
                           std::vector<std::pair<std::string, uint64_t>>& out) {
  auto entries = view_->List(directory);
  ASSERT_TRUE(entries.has_value()) << directory << ": " << entries.error().message;
  for (const ViewEntry& entry : *entries) {
    const std::string path = directory.empty() ? entry.name : StrCat(directory, "/", entry.name);
    auto found = view_->Find(path);
    ASSERT_TRUE(found.has_value()) << path << ": " << found.error().message;
    EXPECT_EQ(found->name, entry.name);
    EXPECT_EQ(found->type, entry.type) << path;
    EXPECT_EQ(found->size, entry.size) << path;
    EXPECT_EQ(found->target, entry.target) << path;
    EXPECT_EQ(found->reading, entry.reading) << path;
    if (entry.type == ViewEntry::Type::kDirectory) Walk(path, out);
    if (entry.type == ViewEntry::Type::kFile) out.emplace_back(path, entry.size);
    if (entry.type == ViewEntry::Type::kSymlink) {
      EXPECT_EQ(entry.size, entry.target.size());
      EXPECT_TRUE(view_->Find(StrCat(directory, "/", entry.target)));
    }
  }
}

std::string ViewFormatSuite::Render(const std::string& path) {
  auto plan = view_->MakePlan(path);
  EXPECT_TRUE(plan.has_value()) << path << ": " << (plan ? "" : plan.error().message);
  if (!plan) return "";
  const PlanReader reader(*plan, step_->model(), step_->blobs());
  return ReadRange(reader, 0, plan->size() + 16);
}

TEST_P(ViewFormatSuite, SizeEqualsBytesReadable) {
  const auto files = Files();
  ASSERT_FALSE(files.empty());
  for (const auto& [path, size] : files) {
    auto plan = view_->MakePlan(path);
    ASSERT_TRUE(plan.has_value()) << path << ": " << plan.error().message;
    EXPECT_EQ(plan->size(), size) << path;
    const Status valid = plan->Validate(step_->model());
    ASSERT_TRUE(valid) << path << ": " << valid.error().message;
    EXPECT_EQ(Render(path).size(), size) << path;
    const PlanReader reader(*plan, step_->model(), step_->blobs());
    EXPECT_EQ(ReadRange(reader, size, 10), "") << path;
  }
}

TEST_P(ViewFormatSuite, AnySplitGivesTheSameBytes) {
  std::mt19937_64 random(7);
  for (const auto& [path, size] : Files()) {
    const std::string whole = Render(path);
    auto plan = view_->MakePlan(path);
    ASSERT_TRUE(plan.has_value());
    const PlanReader reader(*plan, step_->model(), step_->blobs());
    std::string pieces;
    while (pieces.size() < size) {
      const size_t length = 1 + random() % (size / 5 + 1);
      pieces += ReadRange(reader, pieces.size(), length);
    }
    ASSERT_TRUE(pieces == whole) << path;
    for (int i = 0; i < 8; ++i) {
      const uint64_t offset = random() % size;
      const size_t length = random() % 97;
      ASSERT_EQ(ReadRange(reader, offset, length), whole.substr(offset, length)) << path;
    }
  }
}

TEST_P(ViewFormatSuite, TheSameBytesFromANewObject) {
  const auto other = GetParam().format()->Open(ShownState::Of(step_->shared(), layout_));
  ASSERT_TRUE(other.has_value());
  for (const auto& [path, size] : Files()) {
    const std::string first = Render(path);
    auto plan = (*other)->MakePlan(path);
    ASSERT_TRUE(plan.has_value());
    const PlanReader reader(*plan, step_->model(), step_->blobs());
    ASSERT_TRUE(ReadRange(reader, 0, size) == first) << path;
  }
}

// A view that is open needs neither its format nor anybody else who has the step.
TEST_P(ViewFormatSuite, KeepsWhatItNeeds) {
  format_.reset();
  auto copy = std::make_shared<const StepModel>(step_->model());
  const std::weak_ptr<const StepModel> kept = copy;
  auto view = GetParam().format()->Open(ShownState::Of(std::move(copy), layout_));
  ASSERT_TRUE(view.has_value());
  EXPECT_FALSE(kept.expired());
  for (const auto& [path, size] : Files()) {
    const auto entry = (*view)->Find(path);
    ASSERT_TRUE(entry.has_value()) << path;
    EXPECT_EQ(entry->size, size) << path;
    EXPECT_TRUE((*view)->MakePlan(path).has_value()) << path;
  }
  EXPECT_GT((*view)->MemoryBytes(), 0u);
  view = Fail(ErrorCode::kInternal, "closed");
  EXPECT_TRUE(kept.expired());
}

TEST_P(ViewFormatSuite, UnknownNamesAreNotFound) {
  auto top = view_->List("");
  ASSERT_TRUE(top.has_value());
  std::vector<std::string> unknown = {"nothing", "nothing/deeper", "/", "..", "rank", "rank01"};
  for (const auto& [path, size] : Files()) {
    unknown.push_back(path + "x");
    unknown.push_back(path + "/x");
    unknown.push_back("/" + path);
  }
  unknown.push_back((*top)[0].name + "/nothing");
  for (const std::string& path : unknown) {
    auto entry = view_->Find(path);
    ASSERT_FALSE(entry.has_value()) << path;
    EXPECT_EQ(entry.error().code, ErrorCode::kNotFound) << path;
    EXPECT_FALSE(view_->MakePlan(path).has_value()) << path;
    EXPECT_FALSE(view_->List(path).has_value()) << path;
  }
}

TEST_P(ViewFormatSuite, WhatIsRenderedParses) {
  for (const auto& [path, size] : Files()) {
    const std::string bytes = Render(path);
    if (EndsWith(path, ".safetensors")) {
      auto header = ParseSafetensorsHeader(bytes, bytes.size());
      ASSERT_TRUE(header.has_value()) << path << ": " << header.error().message;
      EXPECT_EQ(header->data_offset % 4096, 0u) << path;
    }
    if (!EndsWith(path, ".pt")) continue;
    const std::string file = step_->directory() + "/rendered.pt";
    std::ofstream(file, std::ios::binary) << bytes;
    auto parsed = OpenTorchFile(file);
    ASSERT_TRUE(parsed.has_value()) << path << ": " << parsed.error().message;
    for (const TensorNode& tensor : parsed->tree().tensors) {
      auto located = parsed->Locate(tensor, BlobIndex{});
      ASSERT_TRUE(located.has_value()) << path << ": " << located.error().message;
      auto record = located->Bytes();
      ASSERT_TRUE(record.has_value()) << path << ": " << record.error().message;
      EXPECT_EQ(record->offset % 64, 0u) << path;
    }
  }
}

}  // namespace ckptfs
