"""The bridge to Spark: the provider in Scala, its native methods (JNI), and the jar that carries both.

``quire.jar()`` builds the jar; ``quire.configure()`` hands it to a session.
"""
