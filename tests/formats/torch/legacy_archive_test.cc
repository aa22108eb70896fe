// SPDX-License-Identifier: Apache-2.0

#include "formats/torch/legacy_archive.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/torch/zip_format.h"
#include "tests/support/open_torch_file.h"

namespace ckptfs {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string Text(const std::string& s) {
  return std::string("X") + static_cast<char>(s.size()) + std::string(3, '\0') + s;
}

struct MadeLegacy {
  std::string magic = "\x80\x02\x8a\nl\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
  std::string version = "\x80\x02M\xe9\x03.";
  std::string system = "\x80\x02}" + Text("little_endian") + "\x88s.";
  std::string object = "\x80\x02]ctorch._utils\n_rebuild_tensor_v2\n((" + Text("storage") +
                       "ctorch\nFloatStorage\n" + Text("77") + Text("cpu") +
                       "K\x04NtQK\x01K\x03\x85K\x01\x85\x89" + "ccollections\nOrderedDict\n)RtRa.";
  std::string keys = "\x80\x02]" + Text("77") + "a.";
  uint64_t elements = 4;
  std::string payload = std::string(16, '\5');

  std::string Bytes() const {
    std::string out = magic + version + system + object + keys;
    zip::Store<uint64_t>(out, elements);
    return out + payload;
  }
};

Result<TorchFile> OpenBytes(const std::string& bytes, std::string* path = nullptr) {
  int fd = ::memfd_create("legacy", MFD_CLOEXEC);
  EXPECT_EQ(::pwrite(fd, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  std::string name = "/proc/self/fd/" + std::to_string(fd);
  auto file = OpenTorchFile(name);
  if (path != nullptr) *path = name;
  ::close(fd);
  return file;
}

void ExpectRefused(const MadeLegacy& made, const std::string& rule) {
  std::string path;
  auto file = OpenBytes(made.Bytes(), &path);
  ASSERT_FALSE(file.has_value()) << rule;
  EXPECT_THAT(file.error().message, StartsWith(path));
  EXPECT_THAT(file.error().message, HasSubstr(rule));
}

TEST(LegacyArchiveTest, LocatesStoragesAfterThePickles) {
  std::string bytes = MadeLegacy().Bytes();
  auto file = OpenBytes(bytes);
  ASSERT_TRUE(file.has_value()) << file.error().message;
  auto located = file->Locate(*file->root().at(0).Tensor(), BlobIndex{});
  ASSERT_TRUE(located.has_value()) << located.error().message;
  auto at = located->Bytes();
  ASSERT_TRUE(at.has_value()) << at.error().message;
  EXPECT_EQ(at->offset, bytes.size() - 12);
  EXPECT_EQ(at->length, 12u);
}

TEST(LegacyArchiveTest, RefusesWhatBreaksItsRules) {
  MadeLegacy made;
  made.magic = "\x80\x02K\x05.";
  ExpectRefused(made, "neither a zip nor a legacy");
  made = {};
  made.version = "\x80\x02K\x05.";
  ExpectRefused(made, "protocol version");
  made = {};
  made.system = "\x80\x02}" + Text("little_endian") + "\x89s.";
  ExpectRefused(made, "big-endian");
  made = {};
  made.keys = "\x80\x02]" + Text("78") + "a.";
  ExpectRefused(made, "belongs to no tensor");
  made.keys = "\x80\x02N.";
  ExpectRefused(made, "not a list");
  made = {};
  for (uint64_t elements : {uint64_t{5}, uint64_t{1} << 62, ~uint64_t{0}, uint64_t{1} << 63}) {
    made.elements = elements;
    ExpectRefused(made, "storage '77'");
  }
  made = {};
  made.object = "\x80\x02(((.";
  ExpectRefused(made, "the stack is empty");
}

TEST(LegacyArchiveTest, EveryTruncationIsRefused) {
  std::string whole = MadeLegacy().Bytes();
  for (size_t length = 0; length < whole.size(); ++length) {
    ASSERT_FALSE(OpenBytes(whole.substr(0, length)).has_value()) << length;
  }
}

TEST(LegacyArchiveTest, TarsAreRefusedByName) {
  std::string tar(1024, '\0');
  tar.replace(257, 5, "ustar");
  auto file = OpenBytes(tar);
  EXPECT_EQ(file.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(file.error().message, HasSubstr("tar"));
}

}  // namespace
}  // namespace ckptfs
