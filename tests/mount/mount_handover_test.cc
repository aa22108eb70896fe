// SPDX-License-Identifier: Apache-2.0

#include "mount/daemon/mount_handover.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

MountState Sample() {
  MountState state;
  state.store = "/store \xff";  // names are bytes
  state.mountpoint = "/mnt";
  state.log = "syslog";
  state.program = "1:2:3.4";
  state.generation = 7;
  state.process = 42;
  state.greeting = std::string("\x00\x80\xff init", 8);
  state.kernel.names = {{InodeNumber{1}, 3, ""}, {InodeNumber{~uint64_t{0}}, 1, "/run/a\xfe"}};
  state.kernel.backings = {{ServingMode::kDirect, 5}, {ServingMode::kMaterialise, 6}};
  KnownFile file{FileHandle{9}, InodeNumber{1}, 100, 50, std::nullopt, 1};
  KnownFile text{FileHandle{10}, InodeNumber{2}, 0, 0, "{}", std::nullopt};
  state.kernel.files = {file, text};
  state.kernel.next_handle = 11;
  state.kernel.shown = ShownStep{"a", "latest"};
  state.backing_ids = {{9, 1}};
  return state;
}

TEST(MountHandoverTest, AStateIsReadAsItWasWritten) {
  const MountState state = Sample();
  const auto read = DecodeMountState(EncodeMountState(state));
  ASSERT_TRUE(read) << read.error().message;
  EXPECT_EQ(read->store, state.store);
  EXPECT_EQ(read->mountpoint, state.mountpoint);
  EXPECT_EQ(read->log, state.log);
  EXPECT_EQ(read->program, state.program);
  EXPECT_EQ(read->generation, state.generation);
  EXPECT_EQ(read->process, state.process);
  EXPECT_EQ(read->greeting, state.greeting);
  ASSERT_EQ(read->kernel.names.size(), 2u);
  EXPECT_EQ(read->kernel.names[1].inode, state.kernel.names[1].inode);
  EXPECT_EQ(read->kernel.names[1].path, state.kernel.names[1].path);
  EXPECT_EQ(read->kernel.names[0].references, 3u);
  ASSERT_EQ(read->kernel.backings.size(), 2u);
  EXPECT_EQ(read->kernel.backings[1].mode, ServingMode::kMaterialise);
  EXPECT_EQ(read->kernel.backings[1].fd, -1);  // descriptors come beside
  ASSERT_EQ(read->kernel.files.size(), 2u);
  EXPECT_EQ(read->kernel.files[0].backing, 1u);
  EXPECT_EQ(read->kernel.files[0].streamed, 50u);
  EXPECT_EQ(read->kernel.files[0].text, std::nullopt);
  EXPECT_EQ(read->kernel.files[1].text, "{}");
  EXPECT_EQ(read->kernel.next_handle, 11u);
  EXPECT_EQ(read->kernel.shown->id, "latest");
  EXPECT_EQ(read->backing_ids, state.backing_ids);
}

TEST(MountHandoverTest, WhatIsNotAStateIsRefused) {
  const std::vector<uint8_t> whole = EncodeMountState(Sample());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(DecodeMountState(std::span(whole).first(length))) << length;
  }
  auto json = nlohmann::json::from_cbor(whole);
  json["version"] = kMountStateVersion + 1;
  const auto other = DecodeMountState(nlohmann::json::to_cbor(json));
  EXPECT_EQ(other.error().code, ErrorCode::kUnsupported);
  json["version"] = kMountStateVersion;
  json["kernel"]["files"][0][4] = 2;  // of two backings
  EXPECT_FALSE(DecodeMountState(nlohmann::json::to_cbor(json)));
}

TEST(MountHandoverTest, AProgramIsAsked) {
  const std::filesystem::path folder =
      std::filesystem::path(::testing::TempDir()) / StrCat("successor", ::getpid());
  std::filesystem::create_directories(folder);
  const auto program = [&](const std::string& name, const std::string& text) {
    const std::string path = folder / name;
    std::ofstream(path) << text;
    ::chmod(path.c_str(), 0755);
    return path;
  };
  const std::string asked =
      StrCat("#!/bin/sh\ntest \"$*\" = 'upgrade --accepts ", kMountStateVersion,
             "' || exit 1\necho '", kAcceptance.substr(0, kAcceptance.size() - 1), "'");
  EXPECT_TRUE(CheckSuccessor(program("knows", asked)));
  const std::pair<std::string, std::string> others[] = {
      {"refuses", "#!/bin/sh\nexit 2\n"},
      {"silent", "#!/bin/sh\nexit 0\n"},
      {"another", "#!/bin/sh\necho 'ckptfs 0.0.1'\n"},
      {"talks", asked + "\necho more\n"},
      {"fails", asked + "\nexit 1\n"},
  };
  for (const auto& [name, text] : others) {
    EXPECT_EQ(CheckSuccessor(program(name, text)).error().code, ErrorCode::kUnsupported) << name;
  }
  EXPECT_FALSE(CheckSuccessor(folder / "missing"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ckptfs
