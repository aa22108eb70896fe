// SPDX-License-Identifier: Apache-2.0

#include "fs/tree/names.h"

#include <gtest/gtest.h>

#include "fs/tree/node.h"
#include "fs/tree/param_files.h"
#include "fs/tree/source_files.h"

namespace ckptfs {
namespace {

TEST(NamesTest, ComponentsAreEscaped) {
  EXPECT_EQ(EscapeComponent("transformer.h.0.weight"), "transformer.h.0.weight");
  EXPECT_EQ(EscapeComponent("a/b%c\n"), "a%2Fb%25c%0A");
  EXPECT_EQ(EscapeComponent("."), "%2E");
  EXPECT_EQ(EscapeComponent(".."), "%2E%2E");
  EXPECT_EQ(EscapeComponent("..."), "...");
  EXPECT_EQ(EscapeComponent(""), "%");
  EXPECT_EQ(EscapeComponent(std::string_view("\0", 1)), "%00");
}

TEST(NamesTest, LongComponentsAreCutAndStayApart) {
  const std::string a(300, 'a');
  const std::string escaped = EscapeComponent(a);
  EXPECT_EQ(escaped.size(), 217u);
  EXPECT_EQ(escaped.substr(0, 201), std::string(200, 'a') + "~");
  EXPECT_NE(escaped, EscapeComponent(a + "b"));
  EXPECT_EQ(EscapeComponent(std::string(255, 'a')).size(), 255u);
  // Neither an escape nor a UTF-8 sequence is cut.
  for (size_t pad = 0; pad < 4; ++pad) {
    std::string slashes(pad, 'x');
    std::string accents(pad, 'x');
    for (int i = 0; i < 150; ++i) slashes += "/";
    for (int i = 0; i < 150; ++i) accents += "\xc3\xa9";
    const std::string cut = EscapeComponent(slashes);
    EXPECT_EQ((cut.rfind('~') - pad) % 3, 0u) << cut;
    EXPECT_EQ((EscapeComponent(accents).rfind('~') - pad) % 2, 0u);
  }
}

TEST(NamesTest, InodesAndCookiesAvoidReservedNumbers) {
  EXPECT_EQ(InodeOf(7, "/a"), InodeOf(7, "/a"));
  EXPECT_NE(InodeOf(7, "/a"), InodeOf(8, "/a"));
  EXPECT_NE(InodeOf(7, "/a"), InodeOf(7, "/a", 1));
  EXPECT_GT(CookieOf("x"), 2u);
  EXPECT_LT(CookieOf("x"), uint64_t{1} << 63);
}

TEST(NodeTableTest, CollidingPathsGetNumbersOfTheirOwn) {
  NodeTable table(1000);
  const auto node = [](const char* path) {
    Node made;
    made.path = path;
    made.inode = InodeNumber{42};
    return std::make_shared<const Node>(made);
  };
  const NodePtr first = table.Reference(node("/a"));
  const NodePtr second = table.Reference(node("/b"));
  EXPECT_EQ(first->inode, InodeNumber{42});
  EXPECT_NE(second->inode, InodeNumber{42});
  EXPECT_EQ(table.Find(second->inode)->path, "/b");
  EXPECT_EQ(table.Reference(node("/a"))->inode, InodeNumber{42});
  EXPECT_EQ(table.Reference(node("/b"))->inode, second->inode);
  table.Forget(InodeNumber{42}, 2);
  EXPECT_EQ(table.Find(InodeNumber{42}), nullptr);
  EXPECT_EQ(table.size(), 1u);
}

NodePtr ViewNode(uint64_t number) {
  Node node;
  node.kind = NodeKind::kViewEntry;
  node.path = StrCat("/n", number);
  node.inode = InodeNumber{number + 100};
  return std::make_shared<const Node>(std::move(node));
}

TEST(NodeTableTest, NamesLookedUpOneByOneAreBounded) {
  constexpr size_t kLimit = 6400;
  NodeTable table(kLimit);
  size_t most = 0;
  for (uint64_t i = 0; i < 200'000; ++i) {
    NodePtr surplus;
    table.Reference(ViewNode(i), &surplus);
    if (i % 3 == 0) table.Forget(InodeNumber{i + 100}, 1);  // by itself
    if (surplus) table.Forget(surplus->inode, 1);           // because it was asked to
    if (i % 64 == 0) most = std::max(most, table.size());
  }
  EXPECT_LE(most, kLimit + 64);
  EXPECT_GT(table.size(), kLimit / 2);
}

TEST(NodeTableTest, WhatTheKernelKeepsIsKept) {
  NodeTable table(640);
  std::set<uint64_t> asked;
  for (uint64_t i = 0; i < 2000; ++i) {
    NodePtr surplus;
    table.Reference(ViewNode(i), &surplus);
    if (surplus) asked.insert(static_cast<uint64_t>(surplus->inode));
  }
  EXPECT_EQ(table.size(), 2000u);  // it forgot none
  EXPECT_TRUE(table.Find(InodeNumber{100}));
  EXPECT_GT(asked.size(), 640u);  // others in their turn
}

TEST(SourceFilesTest, HostilePathsAndSeveralRoots) {
  StepModel model;
  model.roots = {"/a"};
  for (const char* path : {"x/y", "x", "../up", "/abs", "z//z", "deep/er/file"}) {
    model.blobs.emplace_back();
    model.blobs.back().path = path;
  }
  const SourceIndex index = IndexSources(model);
  EXPECT_EQ(index.at("").size(), 2u) << "x and deep";
  EXPECT_TRUE(index.at("").at("x").directory) << "the first of two that exclude each other";
  EXPECT_TRUE(index.at("deep/er").contains("file"));
  EXPECT_FALSE(index.at("").contains(".."));
  model.roots = {"/a", "/b"};
  EXPECT_TRUE(IndexSources(model).at("x").contains("y")) << "directories that are one step";
  model.blobs.back().root = 1;
  model.blobs.back().path = "x/y";
  EXPECT_TRUE(IndexSources(model).at("root0/x").contains("y"));
  EXPECT_TRUE(IndexSources(model).at("root1/x").contains("y"));
}

TEST(ParamFilesTest, NamesThatAreCutAlikeAndDoubleAtomsStayApart) {
  StepModel model;
  for (const char* name : {"a/b", "a%2Fb", "a/b"}) {
    model.parameters.emplace_back();
    model.parameters.back().name = name;
  }
  for (const uint32_t parameter : {0u, 0u, 1u}) {
    model.atoms.emplace_back();
    model.atoms.back().parameter = ParameterIndex{parameter};
    model.atoms.back().kind = "weight";
    model.atoms.back().shape = {2};
  }
  const ParamIndex index = IndexParameters(model);
  EXPECT_EQ(index.size(), 3u);
  EXPECT_EQ(index.at("a%2Fb").files.size(), 1u);
  EXPECT_EQ(index.at("a%252Fb").files.size(), 1u);
  EXPECT_EQ(index.at("a%2Fb~1").files.size(), 0u);
}

}  // namespace
}  // namespace ckptfs
